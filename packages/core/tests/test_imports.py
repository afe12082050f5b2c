from __future__ import annotations

import subprocess
import sys

import headrace_core
from headrace_core import errors


def test_importing_core_imports_no_torch():
    code = (
        "import pkgutil, importlib, sys, headrace_core\n"
        "for m in pkgutil.walk_packages(headrace_core.__path__, 'headrace_core.'):\n"
        "    importlib.import_module(m.name)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exception_is_in_the_drawn_tree():
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert name in errors.__doc__, name


def test_a_missing_dependency_names_its_install_line():
    error = errors.MissingDependency("x", needed_for="y", install="pip install x")
    assert "not installed. Run: pip install x" in str(error)
    assert isinstance(error, ImportError)
    error = errors.MissingDependency("x", needed_for="y", install="pip install x", found="0.1")
    assert "too old (0.1). Run: pip install x" in str(error)


def test_version():
    assert headrace_core.__version__
