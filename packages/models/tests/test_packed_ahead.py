"""Weights that are packed before the model is built: used where they are the checkpoint's, else left."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import test_families as families
import torch
from safetensors.torch import load_file, save_file
from test_loader import copy
from torch import Tensor

from headrace_core.errors import WeightsError
from headrace_core.model import CausalLM
from headrace_core.ops import LinearOp, OpTable, PackedLinear
from headrace_models.loading.ahead import plan as plans
from headrace_models.loading.ahead.plan import KeptPlan, PackPlan, PlannedWeight, planned_weights
from headrace_models.loading.ahead.weights import WeightsAhead
from headrace_models.loading.loader import load_model
from headrace_testing.model.decoders import Checkpoint, PagedDriver, PlainQuant, build_context

LLAMA = families.TestLlama()
PROMPT = LLAMA.prompt(12)
DOWN = "model.layers.1.mlp.down_proj.weight"


class AdoptingQuant(PlainQuant):
    """Weights as they are, which may be packed already."""

    adopts_packed = True

    def adopt(self, packed: PackedLinear) -> PackedLinear:
        return packed


class Packer:
    """Packs with the ops under test, at once."""

    def __init__(self, planned: Sequence[PlannedWeight], ops: OpTable) -> None:
        self.packed = {
            each.leaf: ops.linear.pack(torch.cat([_rows(part, each) for part in each.parts]))
            for each in planned
        }
        self.taken: list[str] = []
        self.is_mapped = self.expects_file = False

    def wait(self) -> int:
        return sum(packed.num_bytes for packed in self.packed.values())

    def take(self, name: str, op: LinearOp) -> PackedLinear | None:
        self.taken.append(name)
        return self.packed.pop(name, None)

    def close(self) -> None:
        self.packed.clear()


def _rows(part: plans.Piece, weight: PlannedWeight) -> Tensor:
    dtype = getattr(torch, weight.dtype)
    count = part.num_rows * weight.in_features
    flat = torch.frombuffer(part.file, dtype=dtype, count=count, offset=part.offset)
    return flat.view(part.num_rows, weight.in_features).clone()


class Start:
    """One start with a checkpoint, and what came of it."""

    model: CausalLM
    packer: Packer | None

    def __init__(
        self,
        path: Path,
        folder: Path,
        *,
        meanwhile: Callable[[], object] = bool,
        change_packer: Callable[[Packer], object] = bool,
    ) -> None:
        info = LLAMA.resolve(path)
        context = build_context(info)
        context = dataclasses.replace(context, quant=AdoptingQuant(context.ops))
        self.kept = KeptPlan(folder, {"model": str(path)})
        self.plan, self.packer = self.kept.find(), None
        if self.plan is not None and (planned := planned_weights(self.plan, path)):
            self.packer = Packer(planned, context.ops)
            change_packer(self.packer)
        meanwhile()
        self.started_with: list[PackPlan] = []
        """Plans that were told of when the start was over."""
        self.ahead = WeightsAhead(
            path, self.kept, self.plan, self.packer, smallest=1, keep=self.started_with.append
        )
        self.model = load_model(info, context, ahead=self.ahead)
        self.context = context

    @property
    def taken(self) -> int:
        return 0 if self.packer is None else len(self.packer.taken)

    def logits(self) -> Tensor:
        return PagedDriver(self.model).step({"a": PROMPT})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return LLAMA.make_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def planned(llama: Checkpoint, tmp_path: Path) -> tuple[Path, Path, Tensor]:
    """A checkpoint, the folder with its plan, and the logits of the start that left it."""
    path = copy(llama, tmp_path / "model")
    first = Start(path, tmp_path / "plans")
    assert first.taken == 0
    return path, tmp_path / "plans", first.logits()


def the_plan(folder: Path) -> Path:
    [file] = folder.iterdir()
    return file


def test_the_next_start_takes_what_was_packed(planned: tuple[Path, Path, Tensor]) -> None:
    path, folder, logits = planned
    leaves = json.loads(the_plan(folder).read_text())["weights"]
    layers = LLAMA.resolve(path).config["num_hidden_layers"]
    assert len(leaves["layers.0.attention.qkv"]) == 3
    assert len(leaves) >= 4 * layers
    second = Start(path, folder)
    assert second.taken == len(leaves)
    assert torch.equal(second.logits(), logits)
    assert second.ahead.wait() == 0  # all of it was taken, or given back


def test_the_end_of_a_start_is_told_with_what_was_loaded(
    planned: tuple[Path, Path, Tensor],
) -> None:
    path, folder, _ = planned
    second = Start(path, folder)
    assert not second.started_with
    second.ahead.started()
    assert second.started_with == [second.plan]


def test_a_checkpoint_that_changed_while_it_was_read_is_not_told_of(
    planned: tuple[Path, Path, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder, _ = planned
    end = WeightsAhead.end

    def touched(self: WeightsAhead) -> None:
        os.utime(path / "model.safetensors", (1, 1))
        end(self)

    monkeypatch.setattr(WeightsAhead, "end", touched)
    second = Start(path, folder)
    second.ahead.started()
    assert not second.started_with


@pytest.mark.parametrize("is_mapped", [True, False])
def test_pages_of_a_file_are_still_free(
    planned: tuple[Path, Path, Tensor], is_mapped: bool
) -> None:
    path, folder, _ = planned
    plan = KeptPlan(folder, {"model": str(path)}).find()
    assert plan is not None
    packer = Packer(planned_weights(plan, path), build_context(LLAMA.resolve(path)).ops)
    packer.is_mapped = packer.expects_file = is_mapped
    ahead = WeightsAhead(path, KeptPlan(folder, {}), plan, packer, smallest=1)
    assert ahead.wait() > 0
    assert ahead.reserved() == (0 if is_mapped else ahead.wait())
    assert ahead.expects_file == is_mapped
    ahead.close()
    assert ahead.reserved() == 0


def test_another_content_of_the_same_size_and_time_is_packed_anew(
    planned: tuple[Path, Path, Tensor],
) -> None:
    path, folder, logits = planned
    file = path / "model.safetensors"
    before = file.stat()
    tensors = load_file(file)
    tensors[DOWN].mul_(2)
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    second = Start(path, folder)
    assert second.packer is None
    assert not torch.equal(second.logits(), logits)
    assert Start(path, folder).taken > 0  # the plan is that of the new file


def test_a_file_that_changes_after_it_was_packed_is_packed_again(
    planned: tuple[Path, Path, Tensor], llama: Checkpoint, tmp_path: Path
) -> None:
    path, folder, logits = planned
    other = copy(llama, tmp_path / "other", lambda tensors: tensors[DOWN].mul_(2))

    def replace() -> None:
        os.replace(other / "model.safetensors", path / "model.safetensors")

    second = Start(path, folder, meanwhile=replace)
    assert second.taken == 0
    assert not torch.equal(second.logits(), logits)


def test_a_bad_weight_is_refused_though_there_is_a_plan(
    planned: tuple[Path, Path, Tensor], llama: Checkpoint, tmp_path: Path
) -> None:
    path, folder, _ = planned

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN][3, 5] = float("nan")

    other = copy(llama, tmp_path / "other", spoil)
    os.replace(other / "model.safetensors", path / "model.safetensors")
    with pytest.raises(WeightsError, match="1 NaN"):
        Start(path, folder)


def test_a_plan_that_mixes_layers_up_changes_no_weight(planned: tuple[Path, Path, Tensor]) -> None:
    path, folder, logits = planned
    file = the_plan(folder)
    content = json.loads(file.read_text())
    weights = content["weights"]
    one, other = "layers.0.mlp.down", "layers.1.mlp.down"
    weights[one], weights[other] = weights[other], weights[one]
    weights["layers.0.attention.qkv"].reverse()
    weights["layers.9.nowhere"] = weights.pop("layers.1.mlp.gate_up")
    file.write_text(json.dumps(content))
    second = Start(path, folder)
    assert second.packer is not None
    assert {one, other, "layers.0.attention.qkv", "layers.9.nowhere"}.isdisjoint(
        second.packer.taken
    )
    assert not second.packer.packed  # given back
    assert torch.equal(second.logits(), logits)
    assert json.loads(file.read_text())["weights"] != weights  # put right


def test_a_packed_weight_of_another_shape_is_not_used(planned: tuple[Path, Path, Tensor]) -> None:
    path, folder, logits = planned

    def shorten(packer: Packer) -> None:
        packed = packer.packed["layers.0.mlp.down"]
        short = dataclasses.replace(packed, out_features=packed.out_features - 1)
        packer.packed["layers.0.mlp.down"] = short

    assert torch.equal(Start(path, folder, change_packer=shorten).logits(), logits)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: "[" * 100_000,
        lambda text: json.dumps({**json.loads(text), "files": {}}),
        lambda text: text.replace('"model.safetensors"', '"../model.safetensors"'),
        lambda text: json.dumps({**json.loads(text), "weights": {"embed": 3}}),
        lambda text: json.dumps({**json.loads(text), "weights": {"embed": []}}),
        lambda text: text.replace(
            '"layers.1.mlp.down": [', f'"again": [["model.safetensors", "{DOWN}"]], "layers.1.mlp.down": ['
        ),
        lambda text: json.dumps({**json.loads(text), "weights": {"embed": [["model.safetensors", 3]]}}),
        lambda text: text + " " * plans.MAX_BYTES,
        lambda text: "\ud800",
    ],
)  # fmt: skip
def test_a_damaged_plan_is_written_again(
    planned: tuple[Path, Path, Tensor],
    damage: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, folder, _ = planned
    file = the_plan(folder)
    good = file.read_text()
    file.write_text(damage(good), errors="surrogatepass")
    kept = KeptPlan(folder, {})
    kept._file = file
    with caplog.at_level("INFO"):
        assert kept.find() is None
    assert str(file) in caplog.text
    content = json.loads(good)
    kept.keep(PackPlan(content["files"], content["weights"]))
    found = kept.find()
    assert found is not None
    assert json.loads(json.dumps(found.weights)) == content["weights"]


def test_a_folder_that_cannot_be_written_changes_nothing(llama: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file where the folder should be")
    assert torch.equal(
        Start(llama.path, tmp_path / "plans").logits(), Start(llama.path, tmp_path / "other").logits()
    )  # fmt: skip


def test_a_full_disk_leaves_no_half_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    kept = KeptPlan(tmp_path, {})
    with monkeypatch.context() as full:
        full.setattr(plans.os, "replace", refuse)
        kept.keep(PackPlan({"a": (1, 2, 3, 4, 5)}, {"b": (("a", "c"),)}))
    assert list(tmp_path.iterdir()) == []
    assert kept.find() is None


def test_two_starts_that_write_at_once_leave_one_whole_plan(tmp_path: Path) -> None:
    kinds = [PackPlan({f"{i}": (i,) * 5}, {"x": ((f"{i}", "t" * 1000 * i),)}) for i in (1, 2)]

    def write(plan: PackPlan) -> None:
        kept = KeptPlan(tmp_path, {})
        for _ in range(50):
            kept.keep(plan)

    threads = [threading.Thread(target=write, args=(plan,)) for plan in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert KeptPlan(tmp_path, {}).find() in kinds
    assert len(list(tmp_path.iterdir())) == 1


def test_plans_that_were_used_long_ago_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_FILES", 2)
    plan = PackPlan({"a": (1, 2, 3, 4, 5)}, {"b": (("a", "c"),)})
    for number in range(3):
        kept = KeptPlan(tmp_path, {"number": number})
        kept.keep(plan)
        os.utime(kept._file, (number, number))
    KeptPlan(tmp_path, {"number": 3}).keep(plan)
    found = [KeptPlan(tmp_path, {"number": number}).find() for number in range(4)]
    assert found == [None, None, plan, plan]


def test_a_plan_of_tensors_that_are_no_matrix_is_passed_over(
    planned: tuple[Path, Path, Tensor],
) -> None:
    path, folder, _ = planned
    content = json.loads(the_plan(folder).read_text())
    files = {name: tuple(identity) for name, identity in content["files"].items()}
    [file] = files
    weights = {
        "norm": ((file, "model.norm.weight"),),
        "absent": ((file, "nothing"),),
        "widths": ((file, DOWN), (file, "model.embed_tokens.weight")),
        "down": ((file, DOWN),),
    }
    found = planned_weights(PackPlan(files, weights), path)
    assert [each.leaf for each in found] == ["down"]
    unnamed = PackPlan({"a\0": (1, 2, 3, 4, 5)}, {"down": (("a\0", DOWN),)})
    assert planned_weights(unnamed, path) == []
