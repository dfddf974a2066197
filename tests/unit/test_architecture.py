"""Every name and path in docs/architecture.md and in the drawing of CONTRIBUTING.md exists."""

import ast
import re

import pytest
from places import ROOT

ROOMS = ("protocol", "trainer", "tui", "tests", "bench", "docs")
_DOTTED = re.compile(rf"(?:{'|'.join(ROOMS)})(?:\.\w+)+")
_PATH = re.compile(rf"(?:{'|'.join(ROOMS)})/[\w./-]*")
_CODE = re.compile(r"`([^`\s]+)`")


def quoted(text: str) -> list[str]:
    """Give what stands in backquotes, and is a name or a path of the house."""
    return sorted({word for word in _CODE.findall(text) if _DOTTED.fullmatch(word) or _PATH.fullmatch(word)})


def drawn(text: str) -> list[str]:
    """Give the paths that the first drawing with rooms in it shows: indented names belong to the room above them."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)
    block = next(part for part in blocks if part.startswith("protocol/"))
    found: list[str] = []
    above: dict[int, str] = {}
    for line in block.splitlines():
        head = re.match(r"( *)(\S+)", line)
        if head is None or not re.fullmatch(r"[\w/]+/|\w+\.(py|md)", head[2]):
            continue
        indent, name = len(head[1]), head[2]
        above = {depth: room for depth, room in above.items() if depth < indent}
        parent = above[max(above)] if above else ""
        found.append(parent + name)
        if name.endswith("/"):
            above[indent] = parent + name
        # Further rooms in the same line are beside the first: ``hub/ one per run    agent/ its arm``.
        found += [parent + other for other in re.findall(r"(?<=  )(\w+/)(?= )", line[head.end() :])]
    return found


def exists(name: str) -> bool:
    if "/" in name:
        return (ROOT / name).exists()
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:cut])
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if file.exists():
            return _defines(ast.parse(file.read_text()), parts[cut:])
    return False


def _defines(tree: ast.AST, names: list[str]) -> bool:
    if not names:
        return True
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            return _defines(node, names[1:])
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == names[0] for target in targets):
            return len(names) == 1
    return False


@pytest.mark.parametrize("document", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_name_and_path_in_the_text_exists(document: str) -> None:
    words = quoted((ROOT / document).read_text())
    assert words
    assert [word for word in words if not exists(word)] == []


def test_every_room_that_is_drawn_exists() -> None:
    rooms = drawn((ROOT / "docs/architecture.md").read_text())
    assert len(rooms) > 15
    assert [room for room in rooms if not (ROOT / room).exists()] == []
