from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.teacher.layout import CANARY, HEADER_BYTES, SlotLayout
from mixle.data.teacher.slots import SizeError, SlotReassigned, Slots
from mixle.data.teacher.specs import BatchConfig, TensorSpec

CONFIG = BatchConfig(
    [
        TensorSpec("image", (3, 5), "float32"),
        TensorSpec("hidden", (4,), "bfloat16"),
        TensorSpec("label", (), "int64"),
        TensorSpec("nothing", (0,), "bool"),
    ]
)
LAYOUT = SlotLayout.of(CONFIG)
WRAP = 2**64


def make_slots(count=4):
    memory = bytearray(LAYOUT.segment_bytes(count))
    slots = Slots(memoryview(memory), LAYOUT, count)
    slots.initialize()
    return memory, slots


def sample(value):
    return {
        "image": torch.full((3, 5), float(value)),
        "hidden": torch.full((4,), float(value), dtype=torch.bfloat16),
        "label": torch.tensor(value),
        "nothing": torch.zeros(0, dtype=torch.bool),
    }


def as_arrays(tensors):
    return {name: (t.view(torch.uint16) if t.dtype is torch.bfloat16 else t).numpy() for name, t in tensors.items()}


def assert_sample(tensors, value):
    assert tensors.keys() == sample(0).keys()
    for name, expected in sample(value).items():
        assert tensors[name].dtype is expected.dtype
        assert torch.equal(tensors[name], expected)


# ---- the header


def test_the_header_is_as_documented():
    memory, slots = make_slots()
    slots.prepare(1, 1, 0x1122334455667788, 7)
    slots.write(1, 0x1122334455667788, 7, sample(3), checksum=True)
    header = bytes(memory[LAYOUT.stride : LAYOUT.stride + HEADER_BYTES])
    assert header[0:8] == bytes.fromhex("8877665544332211")
    assert header[8:16] == (7).to_bytes(8, "little")
    assert header[16:24] == CONFIG.nbytes().to_bytes(8, "little")
    assert header[24:28] == (2).to_bytes(4, "little")
    assert header[28:32] != bytes(4)
    assert header[32:] == bytes(32)


def test_every_slot_ends_in_a_canary_from_the_first():
    memory, slots = make_slots(3)
    for slot in range(3):
        assert memory[(slot + 1) * LAYOUT.stride - len(CANARY) : (slot + 1) * LAYOUT.stride] == CANARY
    assert slots.intact(0, 3).all()


# ---- writing and reading


@pytest.mark.parametrize("form", ["bytes", "bytearray", "memoryview", "tensors", "arrays"])
@pytest.mark.parametrize("checksum", [False, True])
def test_a_sample_of_any_form_is_read_as_it_was_written(form, checksum):
    _, slots = make_slots()
    data = CONFIG.encode(**sample(5))
    forms = {
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(data),
        "tensors": sample(5),
        "arrays": as_arrays(sample(5)),
    }
    slots.prepare(2, 1, 9, 1)
    assert not slots.is_complete(2, 9, 1)
    slots.write(2, 9, 1, forms[form], checksum=checksum)
    assert slots.is_complete(2, 9, 1)
    assert slots.is_intact(2)
    assert_sample(slots.tensor(2), 5)
    assert slots.array(2)["label"].shape == ()
    assert slots.complete(0, 4, 7, 1).tolist() == [False, False, True, False]


def test_a_batch_is_one_strided_view_of_the_shared_memory():
    memory, slots = make_slots()
    slots.prepare(1, 3, 40, 1)
    for i in range(3):
        slots.write(1 + i, 40 + i, 1, CONFIG.encode(**sample(i)))
    assert slots.complete(1, 3, 40, 1).all()
    batch = slots.tensors(1, 3)
    assert batch["image"].shape == (3, 3, 5)
    assert batch["nothing"].shape == (3, 0)
    assert batch["hidden"].dtype is torch.bfloat16
    for i in range(3):
        assert_sample({name: tensor[i] for name, tensor in batch.items()}, i)
    memory[LAYOUT.stride + HEADER_BYTES : LAYOUT.stride + HEADER_BYTES + 4] = np.float32(99).tobytes()
    assert batch["image"][0, 0, 0] == 99


@pytest.mark.parametrize("form", ["tensors", "arrays"])
def test_many_samples_are_written_in_one_call(form):
    _, slots = make_slots()
    stacked = {name: torch.stack([sample(i)[name] for i in range(3)]) for name in sample(0)}
    slots.prepare(1, 3, WRAP - 2, 1)
    slots.write_batch(1, 3, WRAP - 2, 1, stacked if form == "tensors" else as_arrays(stacked), checksum=True)
    assert slots.complete(1, 3, WRAP - 2, 1).all()
    assert slots.intact(1, 3).all()
    for i in range(3):
        assert_sample(slots.tensor(1 + i), i)


def test_slots_are_filled_in_place_and_sealed():
    _, slots = make_slots()
    slots.prepare(0, 2, 3, 1)
    out = slots.writable(0, 2, 3, 1)
    for name, array in as_arrays({name: torch.stack([t, t]) for name, t in sample(8).items()}).items():
        out[name][...] = array
    assert not slots.complete(0, 2, 3, 1).any()
    slots.seal(0, 2, 3, 1, checksum=True)
    assert slots.complete(0, 2, 3, 1).all()
    assert slots.intact(0, 2).all()
    assert_sample(slots.tensor(1), 8)


def test_a_tensor_that_requires_grad_is_written_and_not_tracked():
    _, slots = make_slots()
    slots.prepare(0, 1, 1, 1)
    slots.write(0, 1, 1, sample(1) | {"image": torch.ones(3, 5, requires_grad=True)})
    assert not slots.tensor(0)["image"].requires_grad


@pytest.mark.parametrize(
    "image, hidden",
    [
        (torch.arange(15.0).view(5, 3).T, torch.arange(8, dtype=torch.bfloat16)[::2]),
        (torch.tensor(2.0).expand(3, 5), torch.tensor(3, dtype=torch.bfloat16).expand(4)),
        (torch.full((3, 5), 1 + 2j).conj().imag, torch.zeros(4, dtype=torch.bfloat16)),
    ],
    ids=["strided", "expanded", "negated"],
)
def test_a_view_is_written_as_what_it_shows(image, hidden):
    _, slots = make_slots()
    slots.prepare(0, 1, 1, 1)
    slots.write(0, 1, 1, sample(1) | {"image": image, "hidden": hidden})
    assert torch.equal(slots.tensor(0)["image"], image) and torch.equal(slots.tensor(0)["hidden"], hidden)


def freed():
    tensor = torch.ones(3, 5)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_short():
    tensor = torch.ones(3, 5)
    tensor.untyped_storage().resize_(14 * 4)
    return tensor


@pytest.mark.parametrize(
    "image, message",
    [
        (freed(), "'image' has no memory"),
        (cut_short(), "'image' has no memory, or less than it shows"),
        (torch.zeros(3, 5, device="meta"), "'image' is on the meta device"),
        (torch.zeros(3, 5).to_sparse(), "'image' is sparse or nested"),
        (torch.zeros(3, 5).to_mkldnn(), "'image' is sparse or nested"),
    ],
    ids=["freed", "cut short", "meta", "sparse", "opaque"],
)
def test_a_tensor_that_has_not_the_memory_that_it_shows_is_refused_by_name(image, message):
    _, slots = make_slots()
    slots.prepare(0, 1, 1, 1)
    with pytest.raises(ValueError, match=message):
        slots.write(0, 1, 1, sample(1) | {"image": image})
    assert not slots.complete(0, 1, 1, 1).any()


def test_a_tensor_within_a_transform_of_functions_is_refused_by_name():
    _, slots = make_slots()
    slots.prepare(0, 1, 1, 1)

    def write(image):
        slots.write(0, 1, 1, sample(1) | {"image": image})
        return image

    with pytest.raises(ValueError, match="'image' cannot be read"):
        torch.vmap(write)(torch.zeros(2, 3, 5))


def test_a_masked_array_is_refused_for_its_mask_would_be_lost():
    _, slots = make_slots()
    slots.prepare(0, 1, 1, 1)
    with pytest.raises(TypeError, match=r"'image' is a masked array.*filled"):
        slots.write(0, 1, 1, sample(1) | {"image": np.ma.zeros((3, 5), np.float32)})


def test_what_is_written_of_a_mapping_that_makes_its_values_is_what_was_checked():
    class Lazy(UserDict):
        reads = 0

        def __getitem__(self, name):
            self.reads += 1
            value = super().__getitem__(name)
            return value if self.reads <= len(self) else value.double()

    _, slots = make_slots()
    slots.prepare(0, 1, 1, 1)
    slots.write(0, 1, 1, Lazy(sample(3)))
    assert_sample(slots.tensor(0), 3)


@given(
    first=st.integers(0, 7),
    count=st.integers(1, 8),
    token=st.integers(0, WRAP - 1) | st.integers(WRAP - 8, WRAP - 1),
    generation=st.integers(0, WRAP - 1),
    written=st.sets(st.integers(0, 7)),
)
@settings(max_examples=200, deadline=None)
def test_just_the_slots_that_were_written_for_the_order_are_complete(first, count, token, generation, written):
    count = min(count, 8 - first)
    _, slots = make_slots(8)
    slots.prepare(first, count, token, generation)
    for i in written & set(range(count)):
        slots.write(first + i, (token + i) % WRAP, generation, CONFIG.encode(**sample(i)))
    assert slots.complete(first, count, token, generation).tolist() == [i in written for i in range(count)]
    for i in range(count):
        assert slots.is_complete(first + i, (token + i) % WRAP, generation) == (i in written)
    assert not slots.complete(first, count, (token + 1) % WRAP, generation).any()
    assert not slots.complete(first, count, token, (generation + 1) % WRAP).any()


# ---- what is refused, and leaves the slot and its neighbours as they were


def unchanged(act, error, message, *, count=3, slot=1):
    memory, slots = make_slots(count)
    slots.prepare(slot, 1, 9, 1)
    before = bytes(memory)
    with pytest.raises(error, match=message):
        act(slots, slot)
    assert memory == before
    assert slots.intact(0, count).all()
    assert not slots.is_complete(slot, 9, 1)


@pytest.mark.parametrize("slot", [1, 2])
@pytest.mark.parametrize("size", [0, 1, CONFIG.nbytes() - 1, CONFIG.nbytes() + 1, LAYOUT.stride, 10 * LAYOUT.stride])
def test_too_many_or_too_few_bytes_are_refused(size, slot):
    message = f"the sample has {size} bytes; a slot takes exactly {CONFIG.nbytes()}"
    unchanged(lambda slots, i: slots.write(i, 9, 1, bytes(size)), SizeError, message, slot=slot)
    unchanged(lambda slots, i: slots.write(i, 9, 1, np.zeros(size, "u1")), SizeError, message, slot=slot)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (None, TypeError, "a sample must be bytes, contiguous memory or a mapping"),
        ("text", TypeError, "not str"),
        ([1, 2], TypeError, "not list"),
        (np.zeros((2, 200), "u1").T, TypeError, "contiguous"),
        ({"image": torch.zeros(3, 5)}, ValueError, r"lacks \['hidden', 'label', 'nothing'\]"),
        (sample(1) | {"more": torch.zeros(1)}, ValueError, r"has \['more'\], which no spec names"),
        (sample(1) | {"label": 3}, TypeError, "'label' must be a torch tensor or a NumPy array"),
        (sample(1) | {"label": torch.tensor(1.0)}, ValueError, "'label' has dtype float32; its spec says int64"),
        (sample(1) | {"image": torch.zeros(1, 5)}, ValueError, r"'image' has shape \(1, 5\)"),
        (sample(1) | {"image": np.zeros((3, 5))}, ValueError, "'image' has dtype float64"),
    ],
)
def test_a_sample_that_is_none_is_refused_before_a_byte_is_written(bad, error, message):
    unchanged(lambda slots, i: slots.write(i, 9, 1, bad), error, message)


@pytest.mark.parametrize(("token", "generation"), [(8, 1), (9, 2), (9, 0), (0, 0)])
def test_a_late_writer_does_not_touch_a_slot_that_was_handed_on(token, generation):
    data = CONFIG.encode(**sample(1))
    stacked = {name: tensor[None] for name, tensor in sample(1).items()}
    for act in (
        lambda slots, i: slots.write(i, token, generation, data),
        lambda slots, i: slots.write(i, token, generation, sample(1)),
        lambda slots, i: slots.write_batch(i, 1, token, generation, stacked),
        lambda slots, i: slots.writable(i, 1, token, generation),
        lambda slots, i: slots.seal(i, 1, token, generation),
    ):
        unchanged(act, SlotReassigned, "slot 1 is of order 0x9 in generation 1 by now")


def test_one_slot_of_another_order_keeps_a_batch_from_being_written():
    memory, slots = make_slots()
    slots.prepare(0, 3, 5, 1)
    slots.prepare(2, 1, 99, 1)
    before = bytes(memory)
    stacked = {name: torch.stack([tensor] * 3) for name, tensor in sample(1).items()}
    with pytest.raises(SlotReassigned, match="slot 2 is of order 0x63 in generation 1 by now, not of 0x7 in 1"):
        slots.write_batch(0, 3, 5, 1, stacked)
    assert memory == before


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (4, 1), (3, 2), (0, 5), (0, 0), (0, -1), (2**40, 1)])
def test_slots_that_are_not_there_are_refused(first, count):
    _, slots = make_slots(4)
    for act in (slots.arrays, slots.tensors, slots.intact):
        with pytest.raises(IndexError, match=r"are not within \[0, 4\)"):
            act(first, count)
    for act in (slots.complete, slots.writable, slots.seal):
        with pytest.raises(IndexError, match=r"are not within \[0, 4\)"):
            act(first, count, 1, 1)


@pytest.mark.parametrize("slot", [-1, 4])
def test_one_slot_that_is_not_there_is_refused(slot):
    _, slots = make_slots(4)
    for act in (
        lambda: slots.write(slot, 0, 0, CONFIG.encode(**sample(1))),
        lambda: slots.prepare(slot, 1, 0, 0),
        lambda: slots.tensor(slot),
        lambda: slots.array(slot),
        lambda: slots.is_complete(slot, 0, 0),
        lambda: slots.is_intact(slot),
    ):
        with pytest.raises(IndexError, match=rf"slot {slot} is not within \[0, 4\)"):
            act()


def test_memory_that_is_too_small_or_read_only_is_refused():
    with pytest.raises(ValueError, match=r"slot_count=2 slots of \d+ bytes need \d+; the buffer has 64 bytes"):
        Slots(memoryview(bytearray(64)), LAYOUT, 2)
    with pytest.raises(ValueError, match="the buffer is read-only"):
        Slots(memoryview(bytes(LAYOUT.segment_bytes(2))), LAYOUT, 2)


# ---- what is noticed afterwards


def test_a_write_past_a_slot_is_noticed_at_that_slot():
    memory, slots = make_slots(3)
    memory[2 * LAYOUT.stride - 1] ^= 1
    assert slots.intact(0, 3).tolist() == [True, False, True]
    assert [slots.is_intact(slot) for slot in range(3)] == [True, False, True]


@given(byte=st.integers(0, CONFIG.nbytes() - 1), bit=st.integers(0, 7))
@settings(max_examples=50, deadline=None)
def test_a_changed_bit_is_noticed_where_there_is_a_checksum(byte, bit):
    memory, slots = make_slots(2)
    slots.prepare(0, 2, 1, 1)
    for slot in range(2):
        slots.write(slot, 1 + slot, 1, CONFIG.encode(**sample(1)), checksum=slot == 1)
    place = next(offset + byte - packed for packed, offset, size in LAYOUT.runs if packed <= byte < packed + size)
    for slot in range(2):
        memory[slot * LAYOUT.stride + place] ^= 1 << bit
    assert slots.intact(0, 2).tolist() == [True, False]
    assert [slots.is_intact(slot) for slot in range(2)] == [True, False]
