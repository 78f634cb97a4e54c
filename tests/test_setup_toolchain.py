"""What the build finds: which torch, which toolkit, architectures and compiler, and why not."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from build_fakes import (
    SUPPORTED,
    build,
    forget_environment,
    make_nvcc,
    make_toolkit,
    make_torch,
    path_of_tools,
    reason,
    script,
    toolchain,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_environment(monkeypatch, tmp_path)


@pytest.fixture
def no_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    return path_of_tools(monkeypatch, tmp_path / "path")


class TestTorch:
    @pytest.fixture(autouse=True)
    def hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    @pytest.mark.parametrize("version", ["2.11.0", "2.14.1+cu130", "2.12.0a0+git1234", "3.0.0"])
    def test_new_enough(self, tmp_path: Path, version: str) -> None:
        made = make_torch(tmp_path, version)
        assert toolchain.find_torch([str(tmp_path / "none"), str(tmp_path)]) == (made, "")

    def test_older_ones_are_passed_over(self, tmp_path: Path) -> None:
        make_torch(tmp_path / "old", "2.9.1")
        made = make_torch(tmp_path / "new", "2.13.0+cpu", cuda=None)
        found, _ = toolchain.find_torch([str(tmp_path / "old"), str(tmp_path / "new")])
        assert found == made

    def test_too_old(self, tmp_path: Path) -> None:
        make_torch(tmp_path, "2.9.1")
        found, why = toolchain.find_torch([str(tmp_path)])
        assert found is None
        assert why == "PyTorch 2.9.1 is older than 2.11; " + (
            "install torch>=2.11, then reinstall convnormpool"
        )

    def test_none(self, tmp_path: Path) -> None:
        (tmp_path / "torch").mkdir()  # a folder of that name is no torch
        found, why = toolchain.find_torch([str(tmp_path)])
        assert found is None
        assert why.startswith("PyTorch was not found when convnormpool was built; install torch")

    def test_what_is_imported_comes_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        surrounding = make_torch(tmp_path / "surrounding", "2.14.1")
        own = make_torch(tmp_path / "own", "2.12.0")
        spec = importlib.util.spec_from_file_location("torch", own.root / "__init__.py")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        assert toolchain.find_torch([str(surrounding.site)])[0] == own

    @pytest.mark.parametrize("hook", ["wheel", "editable"])
    def test_requirement(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hook: str) -> None:
        name = f"get_requires_for_build_{hook}"
        monkeypatch.setattr(build.build_meta, name, lambda settings: ["own"])
        monkeypatch.setattr(toolchain, "surrounding_sites", lambda: [str(tmp_path)])
        assert getattr(build, name)() == ["own", "torch>=2.11"]
        make_torch(tmp_path, "2.11.0")
        assert getattr(build, name)() == ["own"]

    def test_an_sdist_asks_for_nothing(self) -> None:
        setuptools_own = build.build_meta.get_requires_for_build_sdist
        assert build.get_requires_for_build_sdist == setuptools_own


@pytest.mark.parametrize("visible", [False, True])
def test_surrounding_sites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: bool) -> None:
    text = f"home = /usr/bin\ninclude-system-site-packages = {str(visible).lower()}\n"
    (tmp_path / "pyvenv.cfg").write_text(text)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "base"))
    monkeypatch.setattr(toolchain.site, "getusersitepackages", lambda: "user")
    sites = toolchain.surrounding_sites()
    assert ("user" in sites) == visible
    assert any(site.startswith(str(tmp_path / "base")) for site in sites) == visible
    assert len(set(sites)) == len(sites)


class TestToolkit:
    @pytest.fixture(autouse=True)
    def linux(self, no_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "linux")

    @pytest.fixture
    def torch(self, tmp_path: Path) -> Any:
        return make_torch(tmp_path / "site", "2.14.1+cu130")

    def find(self, torch: Any) -> Any:
        return toolchain.find_toolkit(torch, [str(torch.site)])

    def test_order(
        self, tmp_path: Path, torch: Any, no_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pip = make_toolkit(torch.site / "nvidia" / "cu13")
        assert self.find(torch).nvcc == str(pip / "bin" / "nvcc")
        usual = make_toolkit(tmp_path / "usual")
        assert self.find(torch).nvcc == str(usual / "bin" / "nvcc")
        make_toolkit(tmp_path / "behind")
        wrapper = script(no_path / "nvcc", f'exec {tmp_path}/behind/bin/nvcc "$@"')
        assert self.find(torch).nvcc == str(wrapper)
        home = make_toolkit(tmp_path / "home", "13.2")
        monkeypatch.setenv("CUDA_HOME", str(home))
        found = self.find(torch)
        assert (found.nvcc, found.release) == (str(home / "bin" / "nvcc"), "13.2")

    def test_wrapper(self, tmp_path: Path, torch: Any, no_path: Path) -> None:
        """Headers and libcudart come from where the wrapped nvcc lives."""
        root = make_toolkit(tmp_path / "behind")
        script(no_path / "nvcc", f'exec {root}/bin/nvcc "$@"')
        found = self.find(torch)
        assert found.cudart == root / "lib64" / "libcudart.so.13"
        assert found.includes == (root / "include",)

    def test_link(self, tmp_path: Path, torch: Any, no_path: Path) -> None:
        """An nvcc that tells nothing about itself: the folder that a link leads to."""
        root = make_toolkit(tmp_path / "linked", leave_out="nvcc")
        script(root / "bin" / "nvcc", '[ "$1" = --version ] && echo "release 13.1, V13.1.1"')
        (no_path / "nvcc").symlink_to(root / "bin" / "nvcc")
        assert self.find(torch).cudart.parent == root / "lib64"

    def test_targets(self, tmp_path: Path, torch: Any) -> None:
        """Conda's layout keeps headers and libraries below targets."""
        inner = make_toolkit(tmp_path / "usual" / "targets" / "x86_64-linux", leave_out="nvcc")
        make_nvcc(tmp_path / "usual")
        assert self.find(torch).includes == (inner / "include",)

    @pytest.mark.parametrize("part", ["headers", "cudart"])
    def test_completed_by_pip(self, tmp_path: Path, torch: Any, part: str) -> None:
        """What a toolkit lacks comes from the CUDA that torch itself installs."""
        make_toolkit(tmp_path / "usual", leave_out=part)
        pip = make_toolkit(torch.site / "nvidia" / "cu13", leave_out="nvcc")
        found = self.find(torch)
        assert found.nvcc == str(tmp_path / "usual" / "bin" / "nvcc")
        assert pip / "include" in found.includes
        assert (found.cudart.parent == pip / "lib64") == (part == "cudart")

    @pytest.mark.parametrize(
        ("part", "sentence"),
        [
            ("nvcc", "nvcc is missing"),
            ("headers", "cuda_runtime.h is missing"),
            ("cudart", "libcudart.so.13 is missing"),
        ],
    )
    def test_incomplete(self, tmp_path: Path, torch: Any, part: str, sentence: str) -> None:
        make_toolkit(tmp_path / "usual", leave_out=part)
        said = reason(lambda: self.find(torch))
        assert said.startswith("no complete CUDA 13 toolkit was found for PyTorch 2.14.1+cu130: ")
        assert f"in {tmp_path / 'usual'} {sentence}" in said
        assert 'pip install "cuda-toolkit[nvcc,cccl]==13.0.*", then reinstall' in said

    def test_wrong_nvcc(self, tmp_path: Path, torch: Any) -> None:
        make_toolkit(tmp_path / "usual", "12.8")
        assert "its nvcc is of CUDA 12.8, not 13" in reason(lambda: self.find(torch))

    def test_wrong_headers(self, tmp_path: Path, torch: Any) -> None:
        make_toolkit(tmp_path / "usual", "12.8", leave_out="nvcc")
        make_nvcc(tmp_path / "usual")
        assert "cuda_runtime.h is not of CUDA 13" in reason(lambda: self.find(torch))

    def test_wrong_cudart(self, tmp_path: Path, torch: Any) -> None:
        root = make_toolkit(tmp_path / "usual", leave_out="cudart")
        (root / "lib64").mkdir()
        (root / "lib64" / "libcudart.so.12.8.90").touch()
        (root / "lib64" / "libcudart.so").symlink_to("libcudart.so.12.8.90")
        assert "libcudart.so.12.8.90 is not of CUDA 13" in reason(lambda: self.find(torch))

    def test_broken_nvcc(self, tmp_path: Path, torch: Any) -> None:
        root = make_toolkit(tmp_path / "usual", leave_out="nvcc")
        script(root / "bin" / "nvcc", "exit 1")
        assert f"{root}/bin/nvcc does not run" in reason(lambda: self.find(torch))

    def test_every_place_is_named(
        self, tmp_path: Path, torch: Any, no_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
        script(no_path / "nvcc", "exit 1")
        (torch.site / "nvidia" / "cu13").mkdir(parents=True)
        said = reason(lambda: self.find(torch))
        for place in ("CUDA_HOME (", "nvcc on PATH (", f"{tmp_path / 'usual'} ", "pip's toolchain"):
            assert f"in {place}" in said

    def test_other_builds_of_torch(
        self, tmp_path: Path, torch: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_toolkit(tmp_path / "usual")
        cpu = make_torch(tmp_path / "cpu", "2.13.0+cpu", cuda=None)
        assert "2.13.0+cpu is a CPU-only build; install a CUDA build" in reason(
            lambda: self.find(cpu)
        )
        rocm = make_torch(tmp_path / "rocm", "2.13.0+rocm7", cuda=None, hip="7.0")
        assert "2.13.0+rocm7 is a ROCm build; install a CUDA build" in reason(
            lambda: self.find(rocm)
        )
        monkeypatch.setattr(sys, "platform", "darwin")
        assert "on Linux only, and this is darwin" in reason(lambda: self.find(torch))

    def test_decision(self, tmp_path: Path, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        sites = [str(torch.site)]
        decide = lambda found=torch: toolchain.decide_cuda(found, "no torch; do", sites)  # noqa: E731
        assert reason(decide).startswith("no complete CUDA 13 toolkit")
        assert reason(lambda: decide(None)) == "no torch; do"
        monkeypatch.setenv("CONVNORMPOOL_BUILD", "cuda")
        with pytest.raises(SystemExit, match="CONVNORMPOOL_BUILD=cuda, but no complete CUDA 13"):
            decide()
        with pytest.raises(SystemExit, match="CONVNORMPOOL_BUILD=cuda, but no torch; do"):
            decide(None)
        make_toolkit(tmp_path / "usual")
        assert decide()[1] == ["8.0", "9.0a", "10.0", "12.0+PTX"]
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
        assert decide()[1] == ["8.6"]
        monkeypatch.setenv("CONVNORMPOOL_BUILD", "cpu")
        assert "CONVNORMPOOL_BUILD=cpu asked for no CUDA library; unset it" in reason(decide)
        monkeypatch.setenv("CONVNORMPOOL_BUILD", "gpu")
        with pytest.raises(SystemExit, match="CONVNORMPOOL_BUILD is 'gpu'; use auto, cuda or cpu"):
            decide()


class TestArches:
    @pytest.mark.parametrize(
        ("text", "arches"),
        [
            ("", ["8.0", "9.0a", "10.0", "12.0+PTX"]),
            ("9.0a", ["9.0a"]),
            ("9.0", ["9.0a"]),
            ("8.0;9.0+PTX", ["8.0", "9.0a+PTX"]),
            ("8.0 8.6, 8.0", ["8.0", "8.6"]),
            ("7.5 8.0 8.6 9.0 10.0 12.0+PTX", ["8.0", "8.6", "9.0a", "10.0", "12.0+PTX"]),
            ("10.0f", ["10.0f"]),
        ],
    )
    def test_lists(self, text: str, arches: list[str]) -> None:
        assert toolchain.parse_arches(text, SUPPORTED) == arches

    def test_an_older_nvcc_gets_what_it_knows(self) -> None:
        assert toolchain.parse_arches("", {"8.0", "9.0"}) == ["8.0", "9.0a+PTX"]

    def test_what_is_left_out_is_said(self, capfd: pytest.CaptureFixture[str]) -> None:
        toolchain.parse_arches("7.5;8.0", SUPPORTED)
        assert "7.5 is left out, the kernels need 8.0 or newer" in capfd.readouterr().out

    @pytest.mark.parametrize(
        ("text", "sentence"),
        [
            ("8.0;11.0", "has 11.0, which this nvcc does not know; remove it or use a newer"),
            ("7.0;7.5", "names no architecture from 8.0 on; add one"),
        ],
    )
    def test_refusals(self, text: str, sentence: str) -> None:
        assert sentence in reason(lambda: toolchain.parse_arches(text, SUPPORTED))

    def test_a_word_that_is_no_architecture(self) -> None:
        """A mistake, not a machine without CUDA: nothing is built."""
        wanted = "TORCH_CUDA_ARCH_LIST has 'Hopper'; write it like '8.0;9.0a;12.0\\+PTX'"
        with pytest.raises(SystemExit, match=wanted):
            toolchain.parse_arches("8.0;Hopper", SUPPORTED)

    def test_an_nvcc_that_knows_none(self) -> None:
        assert "this nvcc knows none of 8.0, 9.0a" in reason(
            lambda: toolchain.parse_arches("", {"5.0"})
        )

    def test_flags(self) -> None:
        assert toolchain.arch_flags(["8.0", "9.0a+PTX"]) == [
            "-gencode=arch=compute_80,code=sm_80",
            "-gencode=arch=compute_90a,code=sm_90a",
            "-gencode=arch=compute_90,code=compute_90",
        ]

    def test_what_nvcc_supports(self, tmp_path: Path) -> None:
        assert toolchain.supported_arches(str(make_nvcc(tmp_path))) == SUPPORTED


def test_max_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= toolchain.max_jobs() <= (os.cpu_count() or 1)
    monkeypatch.setenv("MAX_JOBS", "3")
    assert toolchain.max_jobs() == 3
    monkeypatch.setenv("MAX_JOBS", "many")
    with pytest.raises(SystemExit, match="MAX_JOBS is 'many'; use a number from 1 on"):
        toolchain.max_jobs()


class TestCompiler:
    def test_first_that_is_there(self, no_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(toolchain.sysconfig, "get_config_var", lambda name: "gone -pthread")
        with pytest.raises(SystemExit, match="no C\\+\\+ compiler was found; install g\\+\\+ 11"):
            toolchain.host_compiler()
        script(no_path / "clang++", 'echo "#define __cplusplus 201703L"')
        assert toolchain.host_compiler() == ["clang++"]
        script(no_path / "mine", 'echo "#define __cplusplus 202002L"')
        monkeypatch.setenv("CXX", "mine -pipe")
        assert toolchain.host_compiler() == ["mine", "-pipe"]

    def test_too_old(self, no_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script(no_path / "old", 'echo "#define __cplusplus 201402L"')
        monkeypatch.setenv("CXX", "old")
        with pytest.raises(SystemExit, match="old does not compile C\\+\\+17 by default; set CXX"):
            toolchain.host_compiler()
