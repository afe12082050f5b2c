"""Every task of the repository: ``nox`` runs what CI runs, ``nox -l`` lists, ``nox -s NAME`` picks.

Each session makes its own virtual environment, but for torch and triton, 1.7 GB together: these are
installed once, at one version, and a session that asks for them sees them through a path file.
Whatever asks for a range of them afterwards is then already satisfied. What builds packages is shared
the same way, so that the native library is compiled by the first session and found finished by the
others, ``wheels`` too. Sessions that need all packages
together (``dev``, ``types``, ``everything``, ``integration``, ``clients`` and the long ones) share one
environment, ``.nox/dev``, which is installed again only when a package's metadata or its C++ changes.

Environment variables: ``HEADRACE_DISCARD=1`` removes environments as sessions end, but not the shared one.
``HEADRACE_TESTS=full`` runs tests of many cases whole, which else run a sample of them; so does
``nox -s full``. ``HEADRACE_TEST_SEED`` repeats a sample.
``HEADRACE_TORCH`` and ``HEADRACE_TRITON`` are the requirements installed for these two.
``HEADRACE_TORCH_INDEX`` is the package index that is asked for torch besides pip's own; empty for none.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
TORCH = os.environ.get("HEADRACE_TORCH", "torch==2.13.0")
TORCH_INDEX = os.environ.get("HEADRACE_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
"""Has torch for Linux without CUDA's libraries; PyPI's torch brings them, several GB."""
TRITON = os.environ.get("HEADRACE_TRITON", "triton>=3.3")
LAYERS = ROOT / ".nox" / "layers"
TOGETHER = ROOT / ".nox" / "dev"
"""The environment of every session that needs all packages: they install it once."""
BARE = ("--without-pip",) if importlib.util.find_spec("pip") else ()
"""How a session's environment is made: pip is not unpacked for it where nox has one."""
DISCARD = os.environ.get("HEADRACE_DISCARD") == "1"
TESTS = os.environ.get("HEADRACE_TESTS", "full" if "full" in sys.argv else "sampled")
"""``full`` or ``sampled``; ``nox -s full`` is known by its name, before any session begins."""
RUFF, MYPY, XDIST = "ruff==0.17.6", "mypy==2.4.1", "pytest-xdist>=3.8"
STUBS = ("types-PyYAML", "types-tqdm")
DEPLOYED = ("kubernetes-validate==1.37.0", "check-jsonschema>=0.34", "yamllint>=1.37")
"""Check the files of deploy/."""
PACKAGES = (
    "core", "reference", "testing", "kernels", "attention", "quant", "models", "multimodal",
    "distributed", "engine", "server", "demo", "demo_vision", "headrace",
)  # fmt: skip
LIBRARIES = tuple(name for name in PACKAGES if name != "headrace")
"""Packages that know core and nothing else of headrace; their tests may use reference and testing."""
BASE = ("core", "reference", "testing")
"""Installed first and without their extras, which name each other: pip before 23.1 finds no way in."""
WITHOUT_TORCH = ("core", "server", "demo", "demo_vision", "multimodal")
WITH_TRITON = ("kernels", "engine", "distributed")
WAITING = ("engine", "server")
"""Their tests wait for processes, sockets and clocks a third of their time."""

CLIENTS = {
    "current": (("openai>=3", "anthropic"), ("test_openai.py", "test_anthropic.py")),
    "openai-before": (("openai>=2,<3",), ("test_openai.py",)),
    "frameworks": (("langchain-openai", "litellm", "instructor"), ("test_frameworks.py",)),
}
"""Environment -> what it holds, and the files of tests-clients that run in it."""
OLDEST = {
    "packages/core/tests": ("",),  # msgspec
    "packages/engine/tests/input_processing": (  # tokenizers, jinja2
        "test_control_tokens", "test_input_processor", "test_template", "test_tokenizer",
    ),
    "packages/engine/tests/structured": (  # llguidance
        "test_admission", "test_backends", "test_budget", "test_gbnf", "test_holding_back",
        "test_lark_reader", "test_matching", "test_regexes", "test_structural_tag",
    ),
    "packages/engine/tests/clients": ("",),  # pyzmq
    "packages/models/tests": ("test_resolve",),  # safetensors, huggingface_hub
    "packages/multimodal/tests": ("test_fetch", "images/test_pixels"),  # Pillow, httpx2
    "packages/server/tests": (  # fastapi, starlette, uvicorn, pydantic, h11, prometheus-client ...
        "api_processes/", "chat/test_turn", "errors/", "http/", "observability/test_access_log",
        "observability/test_instrumentation", "protocols/test_anthropic", "protocols/test_chat",
        "protocols/test_completions", "protocols/test_responses", "security/", "speech/",
        "streaming/test_direct",
    ),
}  # fmt: skip
"""Suites of the session ``oldest``: folder -> its files and folders that go through a library whose lowest
version is declared; "" for all.

Left out: tests that need an optional library (xgrammar, outlines, av, transformers), and those of what
headrace itself does with texts of models, with the names of clients' types, with several models.
"""
KEEP = {"kernels": 8, "reference": 12}
"""Package -> cases of a test of which a sample is run where there are more; 24 elsewhere."""
NOT_OLDEST = (
    "packages/models/tests/test_resolve.py::TestArchitecture::test_typo_prints_the_nearest",
)

os.environ["PYTHONDONTWRITEBYTECODE"] = ""
"""Images of containers set it; each process that a test starts would then compile all that it imports."""
os.environ.setdefault("PIP_COMPILE", "0")
"""The first import compiles a module, for all later ones: most are never imported, and pip compiles on
one core."""

nox.options.sessions = [
    "lint", "imports", "types", "tests", "everything", "integration", "clients", "oldest",
    "wheels", "docs",
]  # fmt: skip
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "venv"


def _tidy(run: Callable[..., None]) -> Callable[..., None]:
    """Remove the session's environment when it has run, where that is asked for."""

    @functools.wraps(run)
    def tidied(session: nox.Session, *args: object, **kwargs: object) -> None:
        try:
            run(session, *args, **kwargs)
        finally:
            if DISCARD:
                shutil.rmtree(session.virtualenv.location, ignore_errors=True)

    return tidied


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the session that uses it."""

    session: nox.Session
    home: Path

    def run(self, program: str, *words: str, env: Mapping[str, str] | None = None) -> None:
        """Run one of its programs, with all of them on the PATH."""
        self._run(self.session.run, program, words, env or {})

    def install(self, *words: str) -> None:
        """Install with pip, quietly; no words install nothing."""
        if words:
            self.pip("install", *words)

    def pip(self, command: str, *words: str, env: Mapping[str, str] | None = None) -> None:
        """Run its pip quietly; that of nox, if it has none.

        One compiler more at once than there are cores: the native library has five large files, of which
        two cores would leave the last to one of them.
        """
        own = (self.home / "bin" / "pip").exists()
        where = () if own else ("--python", str(self.home / "bin" / "python"))
        self._run(self.session.run_install, "python" if own else sys.executable,
                  ("-m", "pip", *where, command, "--quiet", *words),
                  {"CMAKE_BUILD_PARALLEL_LEVEL": str((os.cpu_count() or 1) + 1), **(env or {})})  # fmt: skip

    def _run(
        self, how: Callable[..., object], program: str, words: Sequence[str], env: Mapping[str, str]
    ) -> None:
        folder = self.home / "bin"
        path = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
        how(str(folder / program), *words, env={**env, "PATH": path}, external=True)

    def layer(self, *requirements: str, index: str = "") -> Path:
        """Show it packages that all environments share, with what they need.

        ``index`` is asked besides pip's own, where it can be reached. Returns the packages' folder.
        """
        name = re.sub(r"[^\w.]+", "-", f"py{sys.version_info.minor}-{'-'.join(requirements)}")
        layer = LAYERS / name
        if not layer.exists():
            part = LAYERS / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            words = ["--extra-index-url", index] if _reached(self.session, index) else []
            self.install("--target", str(part), *words, *requirements)
            part.rename(layer)
        site = next(self.home.rglob("site-packages"))
        (site / f"layer-{name}.pth").write_text(f"{layer}\n")
        return layer

    def torch(self, *, triton: bool = False) -> Path:
        """Show it torch, and triton where it exists. Returns the folder that has torch."""
        layer = self.layer(TORCH, index=TORCH_INDEX if sys.platform == "linux" else "")
        if triton and sys.platform == "linux":
            self.layer(TRITON)
        return layer

    def backends(self, package: str) -> None:
        """Show it what the package's build asks for, and nothing else that builds."""
        tools = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
        self.layer(*_build_requires(package), *tools)

    def tree(
        self, *paths: str, more: tuple[str, ...] = (), constraints: Path | None = None
    ) -> None:
        """Install packages of the tree so that edits are seen, built by what all share; and more."""
        self.backends("kernels")
        self.layer("editables")
        words = ["-c", str(constraints)] if constraints else []
        for path in paths:
            words += ["-e", path]
        self.install("--no-build-isolation", *words, *more)

    def editable(self, *packages: str, extra: str = "test") -> None:
        """Install packages from the tree, and nothing of headrace from an index."""
        self.tree(*map(_path, BASE))
        self.tree(*(_path(package, extra) for package in packages))

    def pytest(
        self, *words: str, keep: int | None = None, processes: int = 2, dist: str = "loadfile"
    ) -> None:
        """Run pytest in two processes of one thread each: what two cores can carry; more where tests wait
        for servers and clocks most of their time.

        ``CI`` has hypothesis repeat the same examples, and never fail a test for a slow machine.
        ``HEADRACE_TESTS`` has tests of many cases run a sample of them (headrace_testing/sampling.py),
        of more than ``keep`` where it is given.
        """
        sampled = {"HEADRACE_TEST_KEEP": str(keep)} if keep else {}
        self.run("pytest", "-n", str(processes), "--dist", dist, *words, *self.session.posargs,
                 env={"OMP_NUM_THREADS": "1", "CI": "true", "HEADRACE_TESTS": TESTS, **sampled})  # fmt: skip


def _own(session: nox.Session) -> Environment:
    """The environment that nox made for this session, with no layer yet."""
    home = Path(session.virtualenv.location)
    _forget_layers(home)
    return Environment(session, home)


def _forget_layers(home: Path) -> None:
    """Forget what an earlier noxfile showed: one backend is known by its folder to what it built."""
    for seen in home.glob("lib/*/site-packages/layer-*.pth"):
        seen.unlink()


def _together(session: nox.Session, *more: str) -> Environment:
    """The environment with all packages and what their tests need, and requirements besides."""
    environment = Environment(session, TOGETHER)
    mark, state = TOGETHER / "installed.txt", _installed_state()
    if not mark.exists() or mark.read_text() != state:
        if not (TOGETHER / "bin" / "python").exists():
            session.run_install(sys.executable, "-m", "venv", str(TOGETHER), external=True)
        _forget_layers(TOGETHER)
        environment.torch(triton=True)
        environment.editable(*LIBRARIES)
        environment.tree(_path("headrace", "test"))
        mark.write_text(state)
    environment.install(*more)
    return environment


def _installed_state() -> str:
    """A digest of what an editable install depends on: versions, entry points, requirements, C++."""
    files = [ROOT / "noxfile.py"]
    for package in PACKAGES:
        home = ROOT / "packages" / package
        files += [home / "pyproject.toml", home / "native" / "CMakeLists.txt"]
        files += sorted([*(home / "native").rglob("*.cpp"), *(home / "native").rglob("*.h")])
    digest = hashlib.sha256(f"{TORCH} {TRITON} {sys.version}".encode())
    for file in files:
        if file.is_file() and "CMakeFiles" not in file.parts:
            digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()


def _reached(session: nox.Session, index: str) -> bool:
    """True if a package index is a folder of this machine, or answers within 10 seconds."""
    if not index.startswith("http"):
        return bool(index)
    try:
        urllib.request.urlopen(index, timeout=10).close()
    except OSError as error:
        session.log("%s cannot be reached (%s): pip's own index is asked alone", index, error)
        return False
    return True


def _project(package: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())


def _build_requires(package: str) -> tuple[str, ...]:
    return tuple(_project(package)["build-system"]["requires"])


def _path(package: str, extra: str = "") -> str:
    return f"./packages/{package}{f'[{extra}]' if extra else ''}"


@nox.session(venv_params=BARE)
def serve(session: nox.Session) -> None:
    """Set everything up and serve the demo model: ``nox -s serve -- --port 8000``."""
    environment = _own(session)
    environment.torch()
    environment.editable(*LIBRARIES, extra="")
    environment.tree(_path("headrace"))
    environment.run("headrace", "serve", *session.posargs)


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """Make one environment for working on headrace: every package from the tree, pytest, ruff, mypy."""
    _together(session, XDIST, RUFF, MYPY, *STUBS, *DEPLOYED, "schemathesis>=4.3", "pre-commit")
    session.log("ready: source %s", TOGETHER / "bin" / "activate")


@nox.session(venv_backend="none")
def full(session: nox.Session) -> None:
    """Everything that CI runs, with no test shortened to a sample of its cases: hours."""
    for name in nox.options.sessions:
        session.notify(name)


@nox.session(venv_params=BARE)
@nox.parametrize("package", LIBRARIES, ids=LIBRARIES)
@_tidy
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, with core and itself only."""
    environment = _own(session)
    if package not in WITHOUT_TORCH:
        environment.torch(triton=package in WITH_TRITON)
    base = ["core", "testing"] if package in WITHOUT_TORCH else ["core", "reference", "testing"]
    environment.tree(*map(_path, base), _path(package, "test"), more=(XDIST,))
    # Two files of the kernels' suite are most of it, and their tests share no fixture.
    dist = "worksteal" if package == "kernels" else "loadfile"
    processes = 3 if package in WAITING else 2
    environment.pytest(
        f"packages/{package}/tests", keep=KEEP.get(package), processes=processes, dist=dist
    )


@nox.session(venv_backend="none")
def everything(session: nox.Session) -> None:
    """The meta-package's tests, with all packages together."""
    _together(session, XDIST).pytest("packages/headrace/tests", processes=3)


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """Real models, real clients, real processes, real sockets."""
    # In the order of their names, files that wait for servers run beside files that compute: those of
    # few tests, which pytest-xdist would leave to the end, are the ones that wait.
    _together(session, XDIST, "schemathesis>=4.3", *DEPLOYED).pytest(
        "tests-integration", "--no-loadscope-reorder", processes=4
    )


def _npm_install(session: nox.Session, folder: str) -> bool:
    """Install a folder's Node packages; False, and said, where npm or its registry is not there."""
    if shutil.which("npm") is None:
        session.warn(
            "npm is not on the PATH, the Node client is left out: install Node.js 20 or later"
        )
        return False
    words = ["npm", "install", "--prefix", folder, "--silent", "--no-audit", "--no-package-lock"]
    try:
        subprocess.run(words, check=True, timeout=180)
    except (OSError, subprocess.SubprocessError) as error:
        session.warn("npm could not install the Node client, it is left out: %s; "
                     "see 'npm config get registry'", error)  # fmt: skip
        return False
    return True


@nox.session(venv_backend="none")
def clients(session: nox.Session) -> None:
    """The clients that people use, each in an environment of its own, against a real server."""
    environment = _together(session)
    folder, words = Path(session.create_tmp()), list[str]()
    for name, (wanted, files) in CLIENTS.items():
        home = folder / name
        environment.run("python", "-m", "venv", "--without-pip", str(home))
        python = str(home / "bin" / "python")
        environment.run("python", "-m", "pip", "--python", python, "install", "--quiet", "pytest>=8.4",
                        "jsonschema", *wanted)  # fmt: skip
        words += [python, "-m", "pytest", "-c", "tests-clients/pytest.ini",
                  *(f"tests-clients/{file}" for file in files), "--"]  # fmt: skip
    if _npm_install(session, "tests-clients/node"):
        words += ["node", "--test", "tests-clients/node/"]
    environment.run("python", "tests-clients/with_server.py", *words)


@nox.session(venv_params=BARE)
@_tidy
def oldest(session: nox.Session) -> None:
    """The lowest versions that the packages declare (torch apart: its CPU build is given).

    Only suites that go through one of these libraries: the others would repeat the session ``tests``. And
    of cases so few as show every value: which values there are is that session's matter. A sampled run has
    every other suite, by days.
    """
    environment = _own(session)
    environment.torch()
    pins = _lowest_versions()
    constraints = Path(session.create_tmp()) / "oldest.txt"
    constraints.write_text("\n".join(pins) + "\n")
    session.log("lowest versions: %s", ", ".join(pins))
    environment.tree(*(_path(package) for package in PACKAGES), constraints=constraints)
    environment.install("-c", str(constraints), "pytest>=8.4", "pytest-asyncio", "pytest-timeout",
                    XDIST, "hypothesis", "openai", "cohere", "ijson", "jsonschema", "mcp",
                    "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")  # fmt: skip
    files = [
        f"{folder}/{name if not name or name.endswith('/') else f'{name}.py'}"
        for folder, names in OLDEST.items()
        for name in names
    ]
    if TESTS == "sampled":
        files = files[_day() % 2 :: 2]
    environment.pytest(*files, *(f"--deselect={test}" for test in NOT_OLDEST), keep=1, processes=3)
    session.run("headrace", "generate", "--prompt", "Hello", "--max-tokens", "4", silent=True)


def _day() -> int:
    """The day whose sample is run, as headrace_testing/sampling.py numbers it."""
    seed = os.environ.get("HEADRACE_TEST_SEED", f"{datetime.date.today():%Y%m%d}")
    return int(seed) if seed.isdecimal() else zlib.crc32(seed.encode())


def _lowest_versions() -> list[str]:
    """``name==lower bound`` of every run-time dependency outside headrace; the highest bound wins."""
    lowest: dict[str, str] = {}
    for package in PACKAGES:
        for requirement in _project(package)["project"].get("dependencies", []):
            match = re.match(r"([\w.-]+)\s*(?:\[[^\]]*\])?\s*>=\s*([\w.]+)", requirement)
            if match is None or match.group(1) == "torch" or match.group(1).startswith("headrace"):
                continue
            name, bound = match.groups()
            if name not in lowest or _key(bound) > _key(lowest[name]):
                lowest[name] = bound
    return [f"{name}=={bound}" for name, bound in sorted(lowest.items())]


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


@nox.session(venv_params=BARE)
def changelogs(session: nox.Session) -> None:
    """Fold the fragments of every package into its changelog, for a release: nox -s changelogs -- 0.2.0."""
    (version,) = session.posargs
    _own(session).install("towncrier>=24.8")
    for package in PACKAGES:
        if any((ROOT / "packages" / package / "changelog.d").glob("*.md")):
            session.run("towncrier", "build", "--yes", "--config", "towncrier.toml",
                        "--dir", f"packages/{package}", "--version", version,
                        "--name", f"headrace-{package}")  # fmt: skip


@nox.session(venv_params=BARE)
@_tidy
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    _own(session).install(RUFF)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", "--quiet", ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy, strict, on every package's source."""
    environment = _together(session, MYPY, *STUBS)
    sources = (str(ROOT / "packages" / package / "src") for package in PACKAGES)
    environment.run("mypy", "--num-workers", "2", *sources)


@nox.session(venv_params=BARE)
@_tidy
def imports(session: nox.Session) -> None:
    """import-linter: the dependency rule, and who imports no torch."""
    _own(session).install("import-linter==2.16")
    paths = [str(ROOT / "packages" / package / "src") for package in PACKAGES]
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": os.pathsep.join(paths)})


@nox.session(venv_params=BARE)
@_tidy
def wheels(session: nox.Session) -> None:
    """Build every wheel; install and use four sets of them in fresh environments."""
    out = Path(session.create_tmp()) / "dist"
    shutil.rmtree(out, ignore_errors=True)
    if TESTS == "full":
        _own(session).pip("wheel", "--no-deps", "--wheel-dir", str(out), *map(_path, PACKAGES))
    else:
        _build_wheels(session, out)
    smoke = ROOT / "tools" / "smoke_wheels.py"
    session.run("python", str(smoke), str(out), str(_own(session).torch()))


def _build_wheels(session: nox.Session, out: Path) -> None:
    """Build every wheel where there is what its build asks for and no more, as in pip's isolation.

    But one environment serves all packages that ask for the same, and the native library is linked of
    the objects that the editable install left; Ninja compiles those that its commands do not fit.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for package in PACKAGES:
        alike.setdefault(_build_requires(package), []).append(package)
    for number, packages in enumerate(alike.values()):
        builder = Environment(session, Path(session.create_tmp()) / f"builder-{number}")
        session.run("python", "-m", "venv", "--clear", *BARE, str(builder.home))
        builder.backends(packages[0])
        builder.pip("wheel", "--no-deps", "--wheel-dir", str(out), *map(_path, packages),
                    "--no-build-isolation", "--check-build-dependencies",
                    env={"SKBUILD_BUILD_DIR": "native"})  # fmt: skip


@nox.session(venv_params=BARE)
@_tidy
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link or an unresolved reference is an error."""
    _own(session).install("mkdocs>=1.6", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.27")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_params=BARE)
def requirements(session: nox.Session) -> None:
    """List what is promised about security and reliability, and the tests that prove it."""
    session.run("python", "tools/requirements.py", *session.posargs)


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """200 streams for a minute on the simulated device, every token checked."""
    _together(session).run("python", "tests-integration/soak.py", *session.posargs)


@nox.session(venv_backend="none")
def endurance(session: nox.Session) -> None:
    """Long runs and crowds at full size: ``nox -s endurance -- soak`` (equal, burst, readers, crowd)."""
    _together(session).run(
        "python", "tests-integration/endurance.py", *(session.posargs or ["soak"])
    )


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """All malformed requests that we know, and 10,000 generated ones: ``nox -s fuzz``."""
    _together(session, "schemathesis>=4.3").run(
        "pytest", "tests-integration/test_malformed.py", *session.posargs,
        env={"OMP_NUM_THREADS": "1", "HEADRACE_FUZZ": "all"})  # fmt: skip


@nox.session(venv_backend="none")
def kills(session: nox.Session) -> None:
    """kill -9 of the engine process, 20 times under load."""
    _together(session).run(
        "pytest", "-s", "tests-integration/test_kills.py", *session.posargs,
        env={"OMP_NUM_THREADS": "1", "HEADRACE_KILLS": "20"})  # fmt: skip


@nox.session(venv_backend="none")
def chaos(session: nox.Session) -> None:
    """kill -9 of engines, ranks and servers behind a router, for ten minutes or ``-- --minutes N``."""
    _together(session).run("python", "tests-integration/chaos.py", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure headrace and the peers that are installed: ``nox -s bench -- --help``."""
    _together(session).run("python", "benchmarks/compare.py", *session.posargs)


if __name__ == "__main__":
    sys.exit("run it with nox: pip install nox && nox -l")
