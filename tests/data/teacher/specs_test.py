import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.teacher.specs import BatchConfig, TensorSpec

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
PAIR = BatchConfig([TensorSpec("x", (2, 3), "float32"), TensorSpec("y", (), "int64")])


def random_tensor(spec, seed):
    bits = torch.randint(0, 2, spec.shape, generator=torch.Generator().manual_seed(seed))
    wide = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)) * 100
    return (bits if spec.dtype == "bool" else wide).abs().to(spec.torch_dtype)


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
configs = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=6).map(
    lambda rows: BatchConfig([TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows)])
)


# ---- what a sample is


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_a_tensor_are_those_that_torch_says(dtype):
    spec = TensorSpec("x", (3, 5), dtype)
    assert spec.torch_dtype is getattr(torch, dtype)
    assert spec.nbytes == torch.empty(3, 5, dtype=spec.torch_dtype).nbytes


def test_shapes_are_tuples_however_they_were_given():
    config = BatchConfig.from_dict({"specs": [{"name": "x", "shape": [2, 3], "dtype": "float32"}]})
    assert config.specs[0].shape == (2, 3)
    assert isinstance(config.specs[0].shape, tuple)
    assert config == BatchConfig([TensorSpec("x", (2, 3), "float32")])
    assert len(config.encode(x=torch.zeros(2, 3))) == 24


def test_a_config_round_trips_through_plain_values_and_yaml(tmp_path):
    import yaml

    assert BatchConfig.from_dict(PAIR.to_dict()) == PAIR
    (tmp_path / "batch.yaml").write_text(yaml.safe_dump(PAIR.to_dict()))
    assert BatchConfig.from_yaml(tmp_path / "batch.yaml") == PAIR
    assert BatchConfig.from_yaml(str(tmp_path / "batch.yaml")).encode(x=torch.zeros(2, 3), y=torch.tensor(1))


def test_omegaconf_lists_are_specs_and_keys_of_hydra_are_left_out():
    omegaconf = pytest.importorskip("omegaconf")
    rows = [{"_target_": "mixle.data.teacher.TensorSpec", "name": "x", "shape": [2], "dtype": "bool"}]
    config = BatchConfig(omegaconf.OmegaConf.create({"specs": rows}).specs)
    assert config == BatchConfig([TensorSpec("x", (2,), "bool")])
    assert isinstance(config.specs[0].shape, tuple)


def test_names_and_specs_are_in_the_order_of_the_bytes():
    assert PAIR.tensor_names == ["x", "y"]
    assert PAIR.get_spec("y") == TensorSpec("y", (), "int64")
    assert PAIR.nbytes() == 32
    expected = np.arange(6, dtype="<f4").tobytes() + np.array(7, "<i8").tobytes()
    assert PAIR.encode(y=torch.tensor(7), x=torch.arange(6.0).reshape(2, 3)) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, (2,), "bool"), TypeError, "name=1 must be a string"),
        (("", (2,), "bool"), ValueError, "must have 1 to 256 bytes"),
        (("é" * 129, (2,), "bool"), ValueError, "must have 1 to 256 bytes"),
        (("x", 3, "bool"), TypeError, "shape=3 of tensor 'x' must be a sequence"),
        (("x", "23", "bool"), TypeError, "must be a sequence of integers"),
        (("x", (2, -1), "bool"), ValueError, "size=-1 must be at least 0"),
        (("x", (2.0,), "bool"), TypeError, "size=2.0 must be an integer"),
        (("x", (True,), "bool"), TypeError, "size=True must be an integer"),
        (("x", (1,) * 33, "bool"), ValueError, "33 dimensions, more than 32"),
        (("x", (2**41,), "bool"), ValueError, "more than 1099511627776"),
        (("x", (2,), "float31"), ValueError, "dtype of tensor 'x'='float31' must be one of .*did you mean 'float32'"),
        (("x", (2,), "complex64"), ValueError, "must be one of"),
    ],
)
def test_a_spec_that_is_none_is_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        TensorSpec(*arguments)


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        ([], ValueError, "has 0 tensors"),
        ("xy", TypeError, "must be a sequence"),
        ({"name": "x"}, TypeError, "must be a sequence"),
        ([3], TypeError, r"specs\[0\]=3 must be a TensorSpec or a mapping"),
        ([{"name": "x", "shape": [1]}], ValueError, r"specs\[0\] has the keys \['name', 'shape'\]; it takes"),
        ([TensorSpec("x", (), "bool")] * 2, ValueError, "names 'x' more than once"),
        ([TensorSpec("x", (2**40,), "bool"), TensorSpec("y", (1,), "bool")], ValueError, "more than 1099511627776"),
    ],
)
def test_a_config_that_is_none_is_refused_by_name(specs, error, message):
    with pytest.raises(error, match=message):
        BatchConfig(specs)


@pytest.mark.parametrize("text", ["specs: 3", "[1]", "{specs: [{name: x}]}", "a: [", "specs: [], more: 1"])
def test_a_yaml_file_that_is_no_config_is_refused_by_its_path(tmp_path, text):
    (tmp_path / "batch.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"batch\.yaml is not a batch config"):
        BatchConfig.from_yaml(tmp_path / "batch.yaml")


def test_a_name_that_no_tensor_has_is_refused_naming_the_likely_one():
    config = BatchConfig([TensorSpec("hidden", (), "bool")])
    with pytest.raises(KeyError, match="did you mean 'hidden'"):
        config.get_spec("hiden")
    with pytest.raises(KeyError, match="no tensor is named"):
        config.decode_single(b"\0", "logits")


# ---- its bytes


@given(config=configs, seed=st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_samples_of_every_dtype_and_shape_round_trip(config, seed):
    sample = {spec.name: random_tensor(spec, seed) for spec in config.specs}
    data = config.encode(**sample)
    assert len(data) == config.nbytes() == sum(tensor.nbytes for tensor in sample.values())
    decoded = config.decode(data)
    assert list(decoded) == config.tensor_names
    for name, tensor in sample.items():
        assert decoded[name].dtype is tensor.dtype
        assert torch.equal(decoded[name], tensor)
        assert torch.equal(config.decode_single(data, name), tensor)


def test_arrays_are_encoded_like_tensors():
    sample = {"x": np.arange(6, dtype=np.float32).reshape(3, 2).T, "y": np.int64(7)}
    assert PAIR.encode(**sample) == PAIR.encode(x=torch.from_numpy(sample["x"]), y=torch.tensor(7))


def test_bfloat16_is_encoded_bit_by_bit_from_its_uint16_array_too():
    config = BatchConfig([TensorSpec("x", (4,), "bfloat16")])
    tensor = torch.tensor([1.0, -2.5, float("nan"), 3e38], dtype=torch.bfloat16)
    assert config.encode(x=tensor.view(torch.uint16).numpy()) == config.encode(x=tensor)


def test_tensors_that_require_grad_or_are_not_contiguous_are_encoded():
    tensor = torch.arange(6.0).reshape(3, 2).T.requires_grad_()
    assert PAIR.encode(x=tensor, y=torch.tensor(0)) == PAIR.encode(x=tensor.detach().clone(), y=torch.tensor(0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(2, 3, dtype=torch.float64)}, ValueError, "'x' has dtype float64; its spec says float32"),
        ({"x": np.zeros((2, 3))}, ValueError, "'x' has dtype float64; its spec says float32"),
        ({"x": np.zeros((2, 3), ">f4")}, ValueError, "'x' has dtype >f4; its spec says float32"),
        ({"x": torch.zeros(3, 2)}, ValueError, r"'x' has shape \(3, 2\); its spec says \(2, 3\)"),
        ({"y": torch.zeros(1, dtype=torch.int64)}, ValueError, r"'y' has shape \(1,\); its spec says \(\)"),
        ({"y": 3}, TypeError, "'y' must be a torch tensor or a NumPy array, not int"),
        ({"z": torch.zeros(1)}, ValueError, r"has \['z'\], which no spec names"),
    ],
)
def test_nothing_is_cast(change, error, message):
    with pytest.raises(error, match=message):
        PAIR.encode(**({"x": torch.zeros(2, 3), "y": torch.tensor(0)} | change))


def test_a_missing_tensor_is_named():
    with pytest.raises(ValueError, match=r"lacks \['y'\]"):
        PAIR.encode(x=torch.zeros(2, 3))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_data_of_another_length_is_refused(size):
    with pytest.raises(ValueError, match=f"data has {size} bytes; a sample of .* has 32"):
        PAIR.decode(bytes(size))
    with pytest.raises(ValueError, match=f"data has {size} bytes"):
        PAIR.decode_single(bytes(size), "y")


def test_data_that_is_not_bytes_is_refused():
    with pytest.raises(TypeError, match="data must be contiguous and bytes-like, not str"):
        PAIR.decode("x" * 32)


def test_decoded_tensors_own_their_memory_and_can_be_written():
    data = bytearray(PAIR.encode(x=torch.ones(2, 3), y=torch.tensor(1)))
    decoded = PAIR.decode(data)
    data[:] = bytes(len(data))
    assert decoded["x"].eq(1).all()
    decoded["x"].add_(1)
    assert decoded["x"].eq(2).all()


def test_neither_torch_nor_zmq_is_imported_for_them():
    code = (
        "import sys; from mixle.data.teacher import cleanup, layout, log_setup, mediums, segment, slots, specs;"
        "assert not {'torch', 'zmq', 'scipy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
