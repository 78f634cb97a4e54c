"""How the build compiles and links, and what it writes down."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from build_fakes import (
    ROOT,
    build,
    forget_environment,
    make_torch,
    path_of_tools,
    script,
    toolchain,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_environment(monkeypatch, tmp_path)


@pytest.fixture
def no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return path_of_tools(monkeypatch, tmp_path / "path")


class TestRecipe:
    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A source tree in a folder whose name needs quoting."""
        root = tmp_path / "a $folder: with space"
        (root / "csrc").mkdir(parents=True)
        # Only Python's entry is exported, so that is what the tests call.
        (root / "csrc" / "answer.h").write_text("#define ANSWER 42\n")
        text = '#include "answer.h"\nconst char* where = __FILE__;\n'
        text += 'extern "C" __attribute__((visibility("default"))) int PyInit_one() {\n'
        (root / "csrc" / "one.cpp").write_text(text + "  return ANSWER + (where == nullptr);\n}\n")
        monkeypatch.setattr(build, "ROOT", root)
        return root

    def make(self, tree: Path) -> bytes:
        """Builds the library and returns its bytes."""
        output = tree / "out" / "one.so"
        recipe = build.Recipe(tree / "work")
        recipe.link([recipe.host("csrc/one.cpp", [])], output)
        recipe.run(2)
        code = f"import ctypes; print(ctypes.CDLL({str(output)!r}).PyInit_one())"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return output.read_bytes() + run.stdout.encode()

    @pytest.mark.parametrize("with_ninja", [True, False])
    def test_build(self, tree: Path, monkeypatch: pytest.MonkeyPatch, with_ninja: bool) -> None:
        if not with_ninja:
            found = shutil.which
            absent = lambda name, **more: None if name == "ninja" else found(name, **more)  # noqa: E731
            monkeypatch.setattr(build.shutil, "which", absent)
        made = self.make(tree)
        assert made.endswith(b"42\n")
        assert os.fsencode(tree) not in made
        (tree / "csrc" / "answer.h").write_text("#define ANSWER 43\n")
        assert self.make(tree).endswith(b"43\n")

    def test_failure(self, tree: Path) -> None:
        (tree / "csrc" / "one.cpp").write_text("this is no C++\n")
        with pytest.raises(SystemExit, match="this command failed"):
            self.make(tree)

    def test_commands(self, tmp_path: Path, no_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No standard is chosen, no mathematics is loosened, no run path is written."""
        script(no_path / "c++", 'echo "#define __cplusplus 201703L"')
        torch = make_torch(tmp_path, "2.11.0")
        cudart, includes = Path("/toolkit/lib64/libcudart.so.13"), (Path("/toolkit/include"),)
        toolkit = toolchain.Toolkit("/toolkit/bin/nvcc", "13.0", cudart, includes)
        decision = build.Decision(torch, toolkit, ["9.0a"], {})
        outputs = {name: tmp_path / name for name in build.SOURCES}
        steps = build.recipe_of(decision, tmp_path / "work", outputs, 4).steps
        words = [word for step in steps for word in step.command]
        assert not [w for w in words if w.startswith(("-std", "-march", "-Wl,-rpath"))]
        assert not [w for w in words if "fast_math" in w or "fast-math" in w]
        made = {Path(step.output).name: step.command for step in steps if not step.compiles}
        assert set(made) == set(build.SOURCES)
        assert made[build.CUDA][-1] == str(cudart)
        assert {step.inputs[0] for step in steps if step.compiles} == {
            str(path.relative_to(ROOT))
            for pattern in ("plan.cpp", "bindings.cpp", "cpu/*.cpp", "cuda/*.cu")
            for path in (ROOT / "csrc").glob(pattern)
        }
        assert all("-DCONVNORMPOOL_SM_90A" in s.command for s in steps if s.inputs[0][-3:] == ".cu")
        only_plan = build.recipe_of(build.Decision(None, None, [], {}), tmp_path, outputs, 4).steps
        assert {s.output for s in only_plan if not s.compiles} == {str(outputs[build.PLAN])}

    @pytest.mark.parametrize(
        ("arches", "hopper"),
        [(["8.0", "9.0a", "12.0+PTX"], True), (["9.0a+PTX"], True), (["8.0+PTX", "10.0"], False)],
    )
    def test_wgmma_kernels(
        self, arches: list[str], hopper: bool, tmp_path: Path, no_path: Path
    ) -> None:
        """They are compiled for 9.0a alone, and where that is not built for not at all."""
        script(no_path / "c++", 'echo "#define __cplusplus 201703L"')
        torch = make_torch(tmp_path, "2.11.0")
        toolkit = toolchain.Toolkit("/bin/nvcc", "13.0", Path("/lib/libcudart.so.13"), ())
        decision = build.Decision(torch, toolkit, arches, {})
        outputs = {name: tmp_path / name for name in build.SOURCES}
        steps = build.recipe_of(decision, tmp_path / "work", outputs, 4).steps
        cuda = [step for step in steps if step.inputs[0].endswith(".cu")]
        wgmma = [step for step in cuda if "_wgmma_" in step.inputs[0]]
        assert len(wgmma) == (19 if hopper else 0)
        assert all(("-DCONVNORMPOOL_SM_90A" in step.command) == hopper for step in cuda)
        (link,) = [s for s in steps if s.output == str(outputs[build.CUDA])]
        assert set(link.inputs) == {step.output for step in cuda}
        for step in cuda:
            flags = [word for word in step.command if word.startswith("-gencode")]
            alone = ["-gencode=arch=compute_90a,code=sm_90a"]
            assert flags == (alone if step in wgmma else toolchain.arch_flags(arches))


def test_information(tmp_path: Path) -> None:
    torch = make_torch(tmp_path, "2.13.0+cpu", cuda=None)
    said = 'it\'s a "reason" \\ with quotes'
    decision = build.Decision(torch, None, [], {build.CUDA: said})
    (tmp_path / "_build.py").write_text(decision.information())
    values = runpy.run_path(str(tmp_path / "_build.py"))
    assert values["TORCH_VERSION"] == "2.13.0+cpu"
    assert values["CUDA_VERSION"] == ""
    assert values["CUDA_ARCHES"] == ()
    assert values["CUDA_REASON"] == said
    assert values["CPU_REASON"] == ""
