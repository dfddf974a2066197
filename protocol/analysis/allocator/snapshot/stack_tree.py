"""The tree of stacks, built once; when the cursor moves, only its sums are computed again."""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ....code_owner import library_of
from ....snapshot.model import Snapshot
from ....text import counted
from .stacks import Tally, frame_words

Key = tuple[int, ...]
"""Frame indices of a node, outermost first; more than one where library frames are folded."""


class StackTree:
    """Every stack requested so far as a branch, with outermost calls at the root (node 0)."""

    def __init__(self, snapshot: Snapshot, fold: bool = True) -> None:
        self.snapshot, self.fold = snapshot, fold
        self.keys: list[Key] = [()]
        # Arrays of integers, because the garbage collector would repeatedly walk a hundred thousand lists.
        self._first_child, self._next_sibling = array("I", [0]), array("I", [0])
        self._parents = array("I", [0])
        self._node_of: dict[tuple[int, Key], int] = {}
        self._leaf_of: dict[int, int] = {0: 0}
        self._library = [bool(library_of(frame.filename)) for frame in snapshot.frames] if fold else []
        self._found: tuple[str, frozenset[int]] = "", frozenset()

    def weigh(self, tallies: Mapping[int, Tally], find: str = "") -> "Node":
        """Return the root of the tree with the sums of a moment.

        Args:
            find: keep only stacks with a frame whose function or file contains this, ignoring case.
        """
        if find:
            wanted = self._matching(find)
            tallies = {stack: tally for stack, tally in tallies.items() if not wanted.isdisjoint(self._stack(stack))}
        leaves = [self._leaf(stack) for stack in tallies]
        sizes, blocks = [0] * len(self.keys), [0] * len(self.keys)
        for leaf, (size, count) in zip(leaves, tallies.values(), strict=True):
            sizes[leaf] += size
            blocks[leaf] += count
        parents = self._parents
        # A node's index is always larger than its parent's.
        for node in range(len(parents) - 1, 0, -1):
            if count := blocks[node]:
                sizes[parents[node]] += sizes[node]
                blocks[parents[node]] += count
        return Node(Weighed(self, sizes, blocks, tallies.get(0, Tally(0, 0))), 0)

    def children(self, node: int) -> Iterator[int]:
        """Iterate over the children of a node."""
        child = self._first_child[node]
        while child:
            yield child
            child = self._next_sibling[child]

    def _stack(self, stack: int) -> list[int]:
        return self.snapshot.stacks[stack]

    def _matching(self, find: str) -> frozenset[int]:
        text = find.lower()
        if self._found[0] != text:
            frames = enumerate(self.snapshot.frames)
            found = (i for i, frame in frames if text in frame.name.lower() or text in frame.filename.lower())
            self._found = text, frozenset(found)
        return self._found[1]

    def _leaf(self, stack: int) -> int:
        found = self._leaf_of.get(stack)
        if found is None:
            found = 0
            for key in self._path(self._stack(stack)):
                found = self._below(found, key)
            self._leaf_of[stack] = found
        return found

    def _below(self, parent: int, key: Key) -> int:
        found = self._node_of.get((parent, key))
        if found is None:
            found = self._node_of[parent, key] = len(self.keys)
            self.keys.append(key)
            self._first_child.append(0)
            self._next_sibling.append(self._first_child[parent])
            self._first_child[parent] = found
            self._parents.append(parent)
        return found

    def _path(self, stack: list[int]) -> Iterable[Key]:
        if not self.fold:
            return [(frame,) for frame in reversed(stack)]
        path: list[Key] = []
        run: list[int] = []
        for frame in reversed(stack):
            if self._library[frame]:
                run.append(frame)
                continue
            if run:
                path.append(tuple(run))
                run = []
            path.append((frame,))
        return [*path, tuple(run)] if run else path


class Weighed(NamedTuple):
    """A tree with the bytes and blocks of a moment, by node."""

    tree: StackTree
    bytes: list[int]
    blocks: list[int]
    without: Tally
    """Bytes without a stack; they count only in the root."""


class Node(NamedTuple):
    """A call, or consecutive library calls folded into one, with the memory allocated at it and below."""

    of: Weighed
    number: int

    @property
    def frames(self) -> Key:
        """Its frames' indices."""
        return self.of.tree.keys[self.number]

    @property
    def bytes(self) -> int:
        """Bytes at it and below."""
        return self.of.bytes[self.number]

    @property
    def blocks(self) -> int:
        """Blocks at it and below."""
        return self.of.blocks[self.number]

    @property
    def children(self) -> list["Node"]:
        """The children with blocks, unordered."""
        weighed = self.of
        return [Node(weighed, child) for child in weighed.tree.children(self.number) if weighed.blocks[child]]

    def ordered(self) -> list["Node"]:
        """Return the children with blocks, most bytes first (for a difference: by absolute value)."""
        sizes, blocks = self.of.bytes, self.of.blocks
        of = self.of
        live = [child for child in of.tree.children(self.number) if blocks[child]]
        return [
            Node(of, child) for child in sorted(live, key=lambda child: (-abs(sizes[child]), -blocks[child], child))
        ]


def stack_tree(snapshot: Snapshot, tallies: Mapping[int, Tally], fold: bool = True, find: str = "") -> Node:
    """Build the tree of stacks for one moment; see ``StackTree.weigh``."""
    return StackTree(snapshot, fold).weigh(tallies, find)


def node_words(node: Node) -> str:
    """Return a node as text: its call, or the innermost of folded library calls."""
    frames, snapshot = node.frames, node.of.tree.snapshot
    if not frames:
        return "everything"
    innermost = snapshot.frames[frames[-1]]
    more = len(frames) - 1
    if not more:
        return frame_words(innermost)
    names = dict.fromkeys(library_of(snapshot.frames[frame].filename) for frame in reversed(frames))
    names.pop("", None)
    return f"{frame_words(innermost)}  (+{counted(more, 'frame')} in {', '.join(list(names)[:3])})"
