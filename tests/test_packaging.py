"""The image and the wheel, as far as they can be checked without a container engine."""

import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "proto", "scripts/build_wire.py", "router", "workers")


def copied_into_the_builder() -> list[str]:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:] for line in lines if re.match(r"COPY (?!--from)", line)]
    return [source for words in copies for source in words[:-1]]


def test_the_image_copies_what_exists_and_what_a_build_needs() -> None:
    sources = copied_into_the_builder()
    assert sorted(source.removeprefix("./") for source in sources) == sorted(SOURCES)
    assert all((ROOT / source).exists() for source in sources)


def test_the_build_context_holds_what_the_image_copies() -> None:
    rules = (ROOT / ".dockerignore").read_text().split()
    for source in copied_into_the_builder():
        verdict = [rule for rule in rules if fnmatch.fnmatch(source, rule.removeprefix("!"))][-1]
        assert verdict.startswith("!"), f"{source} is left out of the build context"


def test_the_image_runs_as_a_user_and_is_probed() -> None:
    text = (ROOT / "Dockerfile").read_text()
    final = text[text.rindex("FROM ") :]
    assert re.search(r"^USER (?!root|0\b)\S+$", final, re.M)
    assert re.search(r'HEALTHCHECK [^[]*CMD \["mmrouter", "health"', final)
    assert 'ENTRYPOINT ["mmrouter"]' in final
    assert "NUMBA_CACHE_DIR=" in final


@pytest.mark.slow
def test_a_wheel_of_a_clean_tree_holds_the_generated_wire_code(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for source in SOURCES:
        target = tree / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            generated = shutil.ignore_patterns("*_pb2*", "__pycache__")
            shutil.copytree(ROOT / source, target, ignore=generated)
        else:
            shutil.copy(ROOT / source, target)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*command, str(tree)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for module in ("common", "vllm_engine", "router"):
        assert f"router/wire/{module}_pb2.py" in names
        assert f"router/wire/{module}_pb2_grpc.py" in names
    assert "workers/sim/__init__.py" in names
    assert not any(name.startswith(("tests/", "scripts/")) for name in names)
