"""Calls that no package of headrace may make, found by the syntax of its source.

An exception is a line of :data:`ALLOWED` with its reason; one that nothing needs any more is an
error too.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

RUNS_CODE = frozenset({"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle",
                       "joblib"})  # fmt: skip
"""Modules whose formats can run code: not even imported."""
BUILT_IN = frozenset({"eval", "exec"})
WAITS = frozenset({"wait", "join", "result", "get", "acquire", "communicate"})
"""Methods that, without an argument, may wait for ever."""
SCHEDULES = frozenset({"create_task", "ensure_future", "wait_until", "gather", "shield"})
"""Who is given a coroutine bounds it, or it is cancelled."""

ALLOWED = {
    ("distributed/kv_connectors/background_writer.py", "BackgroundWriter.close: wait join"):
        "of a daemon thread that writes what waits: bounded bytes, as long as the disk takes",
    ("distributed/kv_connectors/background_writer.py", "BackgroundWriter._work: wait wait"):
        "idle: close ends it; a daemon thread",
    ("engine/clients/group.py", "ReplicaGroup.end: wait join"):
        "of threads that shut engines down, which kill those that do not end",
    ("engine/clients/gathered.py", "gathered_calls.settle: wait result"): "the calls are done",
    ("distributed/kv_connectors/p2p/fetcher.py", "Fetcher._work: wait get"):
        "idle: close puts the end mark; a daemon thread",
    ("engine/mirrored/following.py", "FollowingClient.start: wait result"):
        "rank 0's start has no limit; its end fails it",
    ("engine/mirrored/leading.py", "LeadingClient._repeat.tell: wait result"): "the call is done",
    ("engine/multiproc/leader.py", "PassLeader._watched.tell: wait result"): "the pass is done",
    ("engine/multiproc/nodes/host.py", "_Host._start: wait wait"):
        "a daemon thread that tells of a process's end, whenever that is",
    ("engine/multiproc/nodes/host.py", "_Host._end_children: wait wait"):
        "of processes that were killed just before",
    ("engine/multiproc/ray/actor.py", "RankActor.run: wait wait"):
        "a rank serves until rank 0 ends, whose connection's end ends it",
    ("engine/multiproc/staged.py", "StagedRunner._finish: wait result"):
        "a pass, which a rank's end fails",
    ("engine/multiproc/staged.py", "StagedRunner._replay: wait result"): "the same",
    ("models/stages/passes.py", "StagePasses.members: wait result"):
        "as forward without stages: a rank's end fails it",
    ("models/stages/passes.py", "StagePasses.forward_streams: wait result"): "the same",
    ("models/stages/stage.py", "Link._receive_all: wait get"):
        "idle: close puts the end mark; a daemon thread",
    ("distributed/cuda/nccl.py", "Nccl._operate: wait wait"):
        "the current stream waits, not the host; the group's own limit ends it, with an error",
    ("distributed/eplb/background.py", "BackgroundExchange.result: wait result"):
        "an exchange of ranks: the communicator's own limit ends it, with an error",
    ("distributed/eplb/background.py", "BackgroundExchange.close: wait join"): "the same",
    ("headrace/assembly/parallel/experts.py", "DividedMixtures.end_here: wait result"): "the same",
    ("engine/kv_transfer/whole_blocks.py", "WholeBlocks._result: wait result"): "the call is done",
    ("engine/kv_transfer/worker.py", "BlockMover._finish: wait result"):
        "a stage that is gone ends the group, and so the call",
    ("headrace/assembly/ahead/torch_library.py", "linking_torch: wait join"):
        "the thread opens two libraries, and ends by itself",
    ("headrace/assembly/parallel/prefill_context.py", "divide_passes: wait join"):
        "no thread: ranks join a group, within the meeting place's limit",
    ("headrace/assembly/worker/settings.py", "RankParts._packed_ahead: wait wait"):
        "the thread ends with the weights' files, as loading does",
    ("kernels/cpu/packing_ahead.py", "PackingAhead.wait: wait join"): "the same",
    ("kernels/cpu/packing_ahead.py", "PackingAhead.take: wait join"): "the same",
    ("kernels/cpu/packing_ahead.py", "PackingAhead.close: wait join"): "the thread is told to stop",
    ("models/loading/ahead/weights.py", "WeightsAhead.wait: wait wait"):
        "the thread ends with the weights' files, as loading does",
    ("engine/weights/other_ranks.py", "OtherRanks.change: wait result"):
        "a rank's answer, or its end, which fails the future",
    ("engine/weights/worker.py", "ModelWorker._build_on_all: wait result"):
        "all have answered by then, or ended",
    ("models/loading/ahead/weights.py", "WeightsAhead.reserved: wait wait"): "the same",
    ("kernels/cpu/packed_writer.py", "PackedWriter.wait: wait join"):
        "of a thread that ends with the weights' files and the disk",
    ("kernels/cpu/packed_writer.py", "PackedWriter.close: wait join"): "the thread is told to stop",
    ("engine/kv_transfer/worker.py", "BlockMover.run: wait result"):
        "a rank's reading of blocks, or its end, which fails the future",
    ("engine/lockstep/relay.py", "EngineRelay.close: wait join"):
        "of a thread that was woken just before to end",
    ("distributed/gloo.py", "Gloo._operate: wait wait"): "the group's own limit ends it, with an error",
    ("engine/multiproc/executor.py", "MultiProcExecutor.call: wait result"):
        "as UniProcExecutor.call; a rank's end fails it",
    ("engine/multiproc/executor.py", "_on_every_rank: wait result"):
        "a rank's answer, or its end, which fails the future",
    ("engine/multiproc/adapters.py", "_check_same: wait result"):
        "a rank's reading of files, or its end, which fails the future",
    ("engine/multiproc/rank_processes.py", "RankProcesses.wait_started: wait result"):
        "a worker's creation has no limit; a rank's end fails it",
    ("engine/multiproc/rank_processes.py", "RankProcesses.stop: wait join"):
        "of a thread that was woken just before to end",
    ("server/router/proxy.py", "Proxy.__call__: wait result"): "the task is done",
    ("engine/input_processing/chat/sandbox.py", "jinja2 environment"): "the one renderer",
    ("engine/log_lines.py", "ThreadedHandler._write_all: wait get"):
        "idle: a daemon thread, ended by the end mark",
    ("engine/weights/broadcast.py", "WeightGroup._broadcast: wait wait"):
        "the group's own limit ends it, with an error",
    ("engine/structured/matching.py", "RowConstraint.settle: wait result"):
        "one token's matching, which the backend's limits end",
    ("engine/structured/admission.py", "Admission._verdict: wait result"):
        "of who compiles the same constraint, which has a limit and always ends",
    ("engine/structured/compile_process.py", "CompileProcesses.compile: wait get"):
        "of a process, which whoever has it gives back within the limit of a compilation",
    ("engine/structured/compile_process.py", "CompileProcesses.prepare: wait get"): "the same",
    ("engine/uniproc.py", "UniProcExecutor.start: wait result"):
        "a worker's creation has no limit (CUDA's first start takes a minute)",
    ("engine/uniproc.py", "UniProcExecutor.call: wait result"):
        "loading a model takes as long as the disk does; the front end waits with a limit",
    ("engine/uniproc.py", "UniProcExecutor._serve: wait get"):
        "idle: shutdown puts the end mark; a daemon thread",
    ("engine/clients/child.py", "Commands._answer.send: wait result"): "called when the future is done",
    ("engine/execution/populate.py", "CachePopulator.close: wait join"):
        "the thread looks at its stop flag after each piece of memory",
    ("engine/encoder/slices.py", "*: wait acquire"):
        "two threads that hand each other one turn: each gives it back when its work pauses, ends or raises",
    ("engine/encoder/slices.py", "SlicedWork.close: wait join"): "the thread unwinds where it paused",
    ("engine/encoder/vectors_ahead.py", "VectorsAhead._slice: wait result"): "the work is done",
    ("headrace/cli/local.py", "*: wait join"): "a terminal's own engine: Ctrl-C ends it",
    ("headrace/cli/local.py", "*: wait get"): "a terminal's own engine: Ctrl-C ends it",
    ("headrace/cli/local.py", "*: wait result"): "a terminal's own engine: Ctrl-C ends it",
    ("server/run.py", "_watch: wait wait"): "within wait_for's limit: looks if the engine lives",
    ("engine/offline.py", "OfflineBatch.wait: wait wait"): "looks each second if the core lives",
    ("headrace/batch/generating.py", "GenerateRun.run: wait wait"): "looks each second if the core lives",
    ("engine/offline.py", "OfflineEngine.step: wait wait"): "looks each second if the core lives",
    ("engine/stepping.py", "CoroutineStepper.advance: wait wait"):
        "looks each second if the core lives",
    ("headrace/bench/startup.py", "*: wait wait"): "of a server that was killed just before",
    ("headrace/bench/sweep.py", "*: wait wait"): "of a server that was killed just before",
    ("server/streaming/event_stream.py", "wait_watching: wait result"): "the task is done",
    ("engine/pooling/bounded.py", "run_bounded: wait result"): "the tasks are done",
    ("headrace/offline/recordings.py", "read_ahead: wait result"):
        "of a file that is read, and decoded in a process that has a limit",
    ("server/tools/demo_child.py", "serve: wait get"):
        "idle: a process of its own, ended by a signal when its input ends",
}  # fmt: skip
"""(file below src, with the package's short name; what is done) -> reason. ``*``: anywhere in it."""


class Finding(NamedTuple):
    """A forbidden call."""

    file: str
    what: str
    line: int

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        """Entries of :data:`ALLOWED` that would allow it."""
        where, colon, what = self.what.partition(": ")
        return (self.file, self.what), (self.file, f"*: {what}" if colon else where)


def findings(root: Path = ROOT) -> list[Finding]:
    """All of them, allowed or not, but for suites that tests inherit."""
    found = []
    for file in sorted(root.glob("packages/*/src/**/*.py")):
        package = file.relative_to(root).parts[1]
        name = f"{package}/{'/'.join(file.relative_to(root).parts[4:])}"
        if name.startswith("testing/"):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found += [Finding(name, what, line) for what, line in _Scan().of(tree)]
    return found


class _Scan(ast.NodeVisitor):
    """One file."""

    def __init__(self) -> None:
        self._found: list[tuple[str, int]] = []
        self._where: list[str] = []
        self._bounded: set[int] = set()
        """Calls that are awaited or given to the event loop."""

    def of(self, tree: ast.AST) -> list[tuple[str, int]]:
        self.visit(tree)
        return self._found

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._inside(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._inside(node)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._where.append(node.name)
        self.generic_visit(node)
        self._where.pop()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._import(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._import(node.module or "", node.lineno)
        if (node.module or "").startswith("jinja2") and any(
            alias.name.endswith("Environment") for alias in node.names
        ):
            self._note("jinja2 environment", node.lineno)

    def _import(self, module: str, line: int) -> None:
        top = module.partition(".")[0]
        if top in RUNS_CODE:
            self._note(f"import {top}", line)

    def visit_Await(self, node: ast.Await) -> None:
        self._bounded.add(id(node.value))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr.endswith("Environment") and _root_of(node) == "jinja2":
            self._note("jinja2 environment", node.lineno)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        if isinstance(node.func, ast.Name) and name in BUILT_IN:
            self._note(name, node.lineno)
        if name in SCHEDULES:
            self._bounded.update(id(argument) for argument in node.args)
        self._check_keywords(node, ast.unparse(node.func))
        waits = isinstance(node.func, ast.Attribute) and name in WAITS
        if name == "get" and isinstance(node.func, ast.Attribute):
            waits = not _root_of(node.func).isupper()  # a context variable
        if waits and not node.args and not node.keywords and id(node) not in self._bounded:
            self._note(f"{'.'.join(self._where)}: wait {name}", node.lineno)
        self.generic_visit(node)

    def _check_keywords(self, node: ast.Call, called: str) -> None:
        given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        if called == "torch.load" and given.get("weights_only") is not True:
            self._note("torch.load without weights_only", node.lineno)
        if given.get("trust_remote_code") is True:
            self._note("trust_remote_code=True", node.lineno)
        if given.get("shell") is True:
            self._note("shell=True", node.lineno)
        if called in ("yaml.load", "os.system", "os.popen", "ast.literal_eval"):
            self._note(called, node.lineno)

    def _note(self, what: str, line: int) -> None:
        self._found.append((what, line))


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
