"""The recording file's schema: tables with typed columns, views in common units, a version.

Every row of the stream is keyed by ``seq``, its number in the hub's stream, so a seek is a lookup by primary key.
``docs/recording.md`` documents the file.
"""

import sqlite3
from functools import cache

from ..messages.telemetry import STEP_PHASES

SCHEMA_VERSION = 3  # `PRAGMA user_version`; a newer one is refused, 1 (`step_from_row_v1`) and 2 (`ADDED`) are read
APPLICATION_ID = 0x66746D6E  # `PRAGMA application_id`: `ftmn`. It identifies a recording among SQLite files.
STEP_COLUMNS = (
    *("seq", "t", "rank", "step", "started", "host_us", "device_us", "loss", "lr", "grad_norm", "tokens"),
    *("allocated_peak", "reserved_peak", "resident_peak"),
)
PHASE_COLUMNS = (
    *("host_us", "device_us", "allocated_start", "allocated_end", "allocated_peak"),
    *("reserved_start", "reserved_end", "reserved_peak"),
)
_PHASE_COLUMNS_V1 = (
    *("host_us", "device_us", "allocated_from_previous", "allocated_growth", "allocated_below_peak"),
    *("reserved_from_previous", "reserved_growth", "reserved_below_peak"),
)
ROLLUP_SIZES = (16, 128, 1024, 8192)
"""Steps of one rank that one row of ``rollups`` pools, by level; each is a multiple of the one before."""
ROLLUP_COLUMNS = (
    *("level", "rank", "last_seq", "first_seq", "t", "peak_t", "count", "min_step", "max_step", "host_us"),
    *("max_host_us", "device_us", "loss", "allocated_peak", "reserved_peak", "resident_peak"),
    *(f"{phase}_host_us" for phase in STEP_PHASES),
    *(f"{phase}_device_us" for phase in STEP_PHASES),
)


def _steps_table(phase_columns: tuple[str, ...], rest: str) -> str:
    reals = {"t", "started", "loss", "lr", "grad_norm"}
    columns = [f"{name} {'REAL' if name in reals else 'INTEGER'}" for name in STEP_COLUMNS]
    columns[0] = "seq INTEGER PRIMARY KEY"
    columns += [f"{phase}_{name} INTEGER" for phase in STEP_PHASES for name in phase_columns]
    return f"CREATE TABLE steps({', '.join(columns)}, {rest} BLOB, loss_finite INTEGER, grad_norm_finite INTEGER)"


def _rollups_table() -> str:
    reals = {"t", "peak_t", "loss"}
    columns = ", ".join(f"{name} {'REAL' if name in reals else 'INTEGER'}" for name in ROLLUP_COLUMNS)
    return f"CREATE TABLE rollups({columns}, PRIMARY KEY(level, rank, last_seq)) WITHOUT ROWID"


def _phases_view() -> str:
    queries = [
        f"SELECT seq, t, rank, step, '{phase}' AS phase, {phase}_host_us / 1e3 AS host_ms, "
        f"{phase}_device_us / 1e3 AS device_ms, "
        + ", ".join(f"{phase}_{name} AS {name}_bytes" for name in PHASE_COLUMNS[2:])
        + f" FROM steps WHERE {phase}_host_us IS NOT NULL"
        for phase in STEP_PHASES
    ]
    queries.append(
        "SELECT seq, t, rank, step, phase, host_us / 1e3, device_us / 1e3, allocated_start, allocated_end, "
        "allocated_peak, reserved_start, reserved_end, reserved_peak FROM extra_phases"
    )
    return "CREATE VIEW phases AS " + " UNION ALL ".join(queries)


STATEMENTS = (
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    _steps_table(PHASE_COLUMNS, "rest"),
    "CREATE INDEX steps_rank ON steps(rank)",
    """CREATE TABLE extra_phases(
        seq INTEGER, position INTEGER, t REAL, rank INTEGER, step INTEGER, phase TEXT, host_us INTEGER,
        device_us INTEGER, allocated_start INTEGER, allocated_end INTEGER, allocated_peak INTEGER,
        reserved_start INTEGER, reserved_end INTEGER, reserved_peak INTEGER,
        PRIMARY KEY(seq, position)) WITHOUT ROWID""",
    """CREATE TABLE device_names(
        device INTEGER PRIMARY KEY, host TEXT, kind TEXT, "index" INTEGER, name TEXT, uuid TEXT,
        total_bytes INTEGER, power_limit_w REAL)""",
    "CREATE TABLE process_names(process INTEGER PRIMARY KEY, pid INTEGER, rank INTEGER, name TEXT)",
    """CREATE TABLE device_samples(
        seq INTEGER PRIMARY KEY, t REAL, device INTEGER, time REAL, used_bytes INTEGER, utilization_percent REAL,
        power_w REAL, temperature_c REAL, sm_clock_mhz INTEGER, memory_clock_mhz INTEGER, throttle_reasons TEXT,
        processes BLOB)""",
    "CREATE INDEX device_samples_device ON device_samples(device)",
    """CREATE TABLE alerts(
        seq INTEGER PRIMARY KEY, t REAL, id INTEGER, kind TEXT, severity TEXT, time REAL, rank INTEGER, step INTEGER,
        phase TEXT, title TEXT, text TEXT, resolved REAL, count INTEGER, body BLOB)""",
    "CREATE INDEX alerts_id ON alerts(id)",
    """CREATE TABLE logs(
        seq INTEGER PRIMARY KEY, t REAL, rank INTEGER, time REAL, stream TEXT, text TEXT)""",
    "CREATE INDEX logs_rank ON logs(rank)",
    """CREATE TABLE ranks(
        seq INTEGER PRIMARY KEY, t REAL, rank INTEGER, local_rank INTEGER, host TEXT, pid INTEGER, device TEXT,
        capacity_bytes INTEGER, memory_measure TEXT, model TEXT, zero_stage INTEGER, body BLOB)""",
    "CREATE INDEX ranks_rank ON ranks(rank)",
    "CREATE TABLE events(seq INTEGER PRIMARY KEY, t REAL, type TEXT, rank INTEGER, body BLOB)",
    "CREATE INDEX events_type_rank ON events(type, rank)",
    "CREATE TABLE clock(second INTEGER PRIMARY KEY, seq INTEGER)",
    "CREATE TABLE gaps(id INTEGER PRIMARY KEY, first_t REAL, last_t REAL, messages INTEGER, reason TEXT)",
    _rollups_table(),
    """CREATE TABLE marks(
        rank INTEGER, seq INTEGER, step INTEGER, phase TEXT, bytes INTEGER, shape TEXT,
        PRIMARY KEY(rank, seq, phase)) WITHOUT ROWID""",
    """CREATE TABLE explained(
        seq INTEGER PRIMARY KEY, kind TEXT, rank INTEGER, step INTEGER, phase TEXT, bytes INTEGER)""",
    """CREATE TABLE updates(
        seq INTEGER, position INTEGER, t REAL, rank INTEGER, step INTEGER, name TEXT, updates INTEGER,
        micro_steps INTEGER, loss REAL, lr REAL, grad_norm REAL, loss_finite INTEGER, grad_norm_finite INTEGER,
        PRIMARY KEY(seq, position)) WITHOUT ROWID""",
    """CREATE TABLE training_steps(
        seq INTEGER PRIMARY KEY, training_us INTEGER, label_tokens INTEGER, flops REAL, mfu REAL)""",
    """CREATE TABLE curves(
        level INTEGER, rank INTEGER, last_seq INTEGER, first_seq INTEGER, t REAL, count INTEGER, min_step INTEGER,
        max_step INTEGER, training_us INTEGER, tokens INTEGER, label_tokens INTEGER, flops REAL, loss REAL,
        low_loss REAL, high_loss REAL, lr REAL, grad_norm REAL, max_grad_norm REAL, data_us INTEGER, whole_us INTEGER,
        loss_not_finite INTEGER, grad_norm_not_finite INTEGER, PRIMARY KEY(level, rank, last_seq)) WITHOUT ROWID""",
    """CREATE TABLE evaluations(
        seq INTEGER PRIMARY KEY, t REAL, rank INTEGER, step INTEGER, time REAL, name TEXT, loss REAL, perplexity REAL,
        label_tokens INTEGER, seconds REAL, best INTEGER, loss_finite INTEGER)""",
    """CREATE TABLE checkpoints(
        seq INTEGER PRIMARY KEY, t REAL, rank INTEGER, step INTEGER, time REAL, path TEXT, bytes INTEGER, seconds REAL,
        best INTEGER)""",
    """CREATE TABLE jobs(
        seq INTEGER PRIMARY KEY, t REAL, number INTEGER, state TEXT, started REAL, ended REAL, text TEXT,
        world_size INTEGER, restart INTEGER, command TEXT, shown INTEGER, steps INTEGER, last_step INTEGER, loss REAL,
        step_us INTEGER, allocated_peak INTEGER, reserved_peak INTEGER, resident_peak INTEGER, body BLOB)""",
    _phases_view(),
    """CREATE VIEW throughput AS SELECT seq, t, rank, step, coalesce(training_us, host_us) AS training_us,
        tokens, coalesce(label_tokens, 0) AS label_tokens, flops, mfu FROM steps LEFT JOIN training_steps USING(seq)""",
    """CREATE VIEW devices AS SELECT seq, t, time, host, kind, "index", name, uuid, used_bytes, total_bytes,
        utilization_percent, power_w, power_limit_w, temperature_c, sm_clock_mhz, memory_clock_mhz, throttle_reasons
        FROM device_samples JOIN device_names USING(device)""",
    """CREATE VIEW loss_curve AS SELECT job, step, max(t) AS t, count(*) AS ranks,
        CASE WHEN min(label_tokens) FILTER (WHERE loss_finite) > 0
            THEN sum(loss * label_tokens) FILTER (WHERE loss_finite) / sum(label_tokens) FILTER (WHERE loss_finite)
            ELSE avg(loss) FILTER (WHERE loss_finite) END AS loss,
        min(loss) FILTER (WHERE loss_finite) AS low_loss, max(loss) FILTER (WHERE loss_finite) AS high_loss,
        min(loss_finite) AS loss_finite, avg(lr) AS lr, max(grad_norm) FILTER (WHERE grad_norm_finite) AS grad_norm,
        min(grad_norm_finite) AS grad_norm_finite, sum(tokens) AS tokens, max(training_us) AS training_us
        FROM (SELECT job, max(seq) AS seq FROM (
            SELECT job, first, lead(first, 1, 1 << 62) OVER (ORDER BY first) AS next FROM (
                SELECT 1 AS job, 0 AS first
                UNION ALL SELECT number, min(seq) FROM jobs WHERE shown AND restart = 0 GROUP BY number))
            CROSS JOIN steps ON seq >= first AND seq < next GROUP BY job, rank, step) JOIN steps USING(seq)
        JOIN (SELECT seq, training_us, label_tokens FROM throughput) USING(seq) GROUP BY job, step""",
    """CREATE VIEW jobs_latest AS SELECT seq, t, number, state, started, ended, text, world_size, restart, command,
        steps, last_step, loss, step_us, allocated_peak AS allocated_peak_bytes, reserved_peak AS reserved_peak_bytes,
        resident_peak AS resident_peak_bytes FROM jobs WHERE seq IN (SELECT max(seq) FROM jobs GROUP BY number)""",
    """CREATE VIEW ranks_latest AS SELECT ranks.seq AS seq, ranks.t AS t, ranks.rank AS rank, local_rank, host, pid,
        device, capacity_bytes, memory_measure, model, zero_stage, step AS last_step, steps.t AS last_t, loss,
        loss_finite, grad_norm, grad_norm_finite, allocated_peak AS allocated_peak_bytes,
        reserved_peak AS reserved_peak_bytes, resident_peak AS resident_peak_bytes
        FROM ranks LEFT JOIN steps ON steps.seq = (SELECT max(seq) FROM steps AS own WHERE own.rank = ranks.rank)
        WHERE ranks.seq IN (SELECT max(seq) FROM ranks GROUP BY rank)""",
)
"""The statements that create an empty recording, in order."""
STREAM_TABLES = ("steps", "device_samples", "alerts", "logs", "ranks", "events", "jobs")
"""The tables whose rows are messages of the stream; their ``seq`` never repeats across them."""
STATEMENTS_V1 = tuple(
    _steps_table(_PHASE_COLUMNS_V1, "detail") if statement.startswith("CREATE TABLE steps(") else statement
    for statement in STATEMENTS
    if not statement.startswith("CREATE VIEW")
)
"""Those of schema 1, without its views; early recordings of that schema lack the tables after ``rollups``."""
_FINITE = "{0} BETWEEN -1.7976931348623157e308 AND 1.7976931348623157e308"
"""Null if the figure is: of older recordings only infinity is known."""
ADDED: dict[str, dict[str, str]] = {
    "steps": {f"{name}_finite": _FINITE.format(name) for name in ("loss", "grad_norm")},
    "updates": {f"{name}_finite": _FINITE.format(name) for name in ("loss", "grad_norm")},
    "curves": {"loss_not_finite": "0", "grad_norm_not_finite": "0"},
    "evaluations": {"loss_finite": _FINITE.format("loss")},
}
"""Last columns of tables, which schemas 1 and 2 lack, and the expressions that are read in their place."""
Columns = list[tuple[str, str, int, int]]
"""Name, type, place in the primary key, and whether it is generated or of a virtual table, of each column."""


def _columns_of(connection: sqlite3.Connection, table: str) -> Columns:
    found = connection.execute(f"PRAGMA table_xinfo({table})")
    return [(name, kind.upper(), key, hidden) for _, name, kind, _, _, key, hidden in found]


@cache
def expected_tables(schema: int) -> dict[str, Columns]:
    """Return the tables of a schema by name, as SQLite makes them from its statements."""
    connection = sqlite3.connect(":memory:")
    for statement in STATEMENTS_V1 if schema == 1 else STATEMENTS:
        connection.execute(statement)
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
    later = set[str]() if schema == SCHEMA_VERSION else {column for added in ADDED.values() for column in added}
    return {name: [each for each in _columns_of(connection, name) if each[0] not in later] for (name,) in names}


def kinds_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the kind of each table and view of the file, by name: ``table``, ``view``, ``virtual`` or ``shadow``.

    SQLite parses the statement; the ``type`` column may hold any text. Before SQLite 3.37 the statement's begin counts.
    """
    if sqlite3.sqlite_version_info >= (3, 37):
        rows = connection.execute("PRAGMA main.table_list").fetchall()
        return {row[1]: row[2] for row in rows if row[0] == "main"}
    rows = connection.execute("SELECT name, sql FROM main.sqlite_schema WHERE sql IS NOT NULL").fetchall()
    return {name: "table" if str(sql)[:13].upper() == "CREATE TABLE " else "view" for name, sql in rows}


def table_problems(connection: sqlite3.Connection, schema: int) -> dict[str, str]:
    """Return why tables are not those of the schema, by name; ``""`` for missing ones: the file may be damaged.

    A view, a virtual table or a generated column of the same name would run its author's code whenever it is read.
    Other views, triggers and virtual tables do not run: the file is never changed, and only these tables are read.
    """
    kinds = kinds_of(connection)
    found: dict[str, str] = {}
    for table, expected in expected_tables(schema).items():
        kind = kinds.get(table, "")
        columns = _columns_of(connection, table) if kind == "table" else []
        if kind != "table":
            found[table] = kind and f"{table!r} in it is a {kind}, not a table"
        elif columns[: len(expected)] != expected or any(hidden for *_, hidden in columns):  # later ones may be added
            found[table] = f"its table {table!r} has other columns than a recording's"
    return found
