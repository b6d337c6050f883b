"""Params: named leaves of several dtypes in one buffer, some tied."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tianji.checkpoint import Checkpoints
from tianji.state import decode, encode
from tianji.types import BFLOAT16, CARRIED, Leaf, Params, floats, leaf, packed, sha256

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
LAYOUTS = st.dictionaries(
    st.text(min_size=1, max_size=3),
    st.builds(leaf, SHAPES, st.sampled_from([*CARRIED.values()])),
    max_size=6,
)


@given(LAYOUTS)
def test_leaves_are_aligned_and_do_not_overlap(layout):
    params = Params(layout)
    taken = np.zeros(len(params.buffer), np.int64)
    places, _ = packed(layout)
    for name, x in layout.items():
        assert (params[name].shape, params[name].dtype) == (x.shape, x.dtype)
        assert places[name] % x.dtype.itemsize == 0
        taken[places[name] : places[name] + x.nbytes] += 1
        params[name].reshape(-1).view(np.uint8)[:] = 255
    assert taken.max(initial=0) <= 1
    assert ((params.buffer == 255) == (taken == 1)).all()


def test_params_that_are_all_float32_are_one_flat_array():
    params = Params(floats({"a": (2, 3), "b": (), "c": (4,)}))
    params.flat[:] = np.arange(11)
    assert params["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert params["b"] == 6
    assert len(params.buffer) == 44


def test_no_other_params_are_a_flat_array():
    with pytest.raises(TypeError, match="b is bfloat16"):
        _ = Params({"a": leaf((2,), np.float32), "b": leaf((2,), BFLOAT16)}).flat


def test_a_tied_leaf_is_the_memory_of_another():
    layout = {"head": Leaf((3, 2), BFLOAT16, tied="embed"), "embed": leaf((2, 3), BFLOAT16)}
    params = Params(layout)
    assert len(params.buffer) == 12
    params["embed"].view(np.uint16)[:] = [[1, 2, 3], [4, 5, 6]]
    assert params["head"].view(np.uint16).tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("other", ["nothing", "half", "single", "tied"])
def test_a_leaf_that_cannot_be_tied_is_refused(other):
    layout = {
        "half": leaf((1,), np.float32),
        "single": leaf((2,), np.float16),
        "own": leaf((2,), np.float32),
        "tied": Leaf((2,), np.dtype(np.float32), tied="own"),
        "wrong": Leaf((2,), np.dtype(np.float32), tied=other),
    }
    with pytest.raises(ValueError, match=f"wrong is tied to {other}"):
        Params(layout)


def test_a_dtype_that_cannot_be_carried_is_refused_by_its_name():
    with pytest.raises(TypeError, match="w is complex64"):
        Params({"w": leaf((1,), np.complex64)})


def test_a_buffer_of_another_size_is_refused():
    with pytest.raises(ValueError, match="8 bytes"):
        Params(floats({"w": (2,)}), np.zeros(4, np.uint8))


def halves(count):
    return np.arange(count, dtype=np.uint16).view(BFLOAT16)


def test_bfloat16_keeps_its_name_through_views_and_copies():
    array = halves(6).reshape(2, 3)
    for same in (array[1], array.copy(), np.array(array), array.T, np.concatenate([array, array])):
        assert same.dtype == BFLOAT16


def test_a_hash_knows_bfloat16_from_integers():
    assert sha256({"w": halves(4)}) != sha256({"w": halves(4).view(np.uint16)})
    assert sha256({"w": halves(4)}) == sha256({"w": halves(4).copy()})


def test_a_state_holds_bfloat16():
    arrays = {}
    text = encode({"w": halves(6).reshape(2, 3)}, "part", "", arrays)
    found = decode(text, arrays)["w"]
    assert found.dtype == BFLOAT16
    assert found.view(np.uint16).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_checkpoint_holds_bfloat16_as_safetensors_do(tmp_path):
    checkpoints = Checkpoints(tmp_path, 1, "me")
    w, other = halves(6).reshape(2, 3), np.arange(3.0)
    path = checkpoints.save(1, {"policy": {"params": {"w": w, "none": halves(0), "x": other}}}, {})
    raw = (path / "policy.safetensors").read_bytes()
    assert raw.count(b'"BF16"') == 2
    params = checkpoints.load().parts["policy"]["params"]
    assert params["w"].dtype == params["none"].dtype == BFLOAT16
    assert params["w"].view(np.uint16).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert params["x"].tolist() == [0, 1, 2]
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    (found,) = [
        x
        for x in safetensors.load_file(path / "policy.safetensors").values()
        if x.dtype == torch.bfloat16 and x.numel()
    ]
    assert found.view(torch.uint16).tolist() == [[0, 1, 2], [3, 4, 5]]
