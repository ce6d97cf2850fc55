from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
import time
import weakref

import pytest
import torch
from raw_teacher_peers import RawWorker, until
from teacher_run import CONFIG, free_ports, sample, teacher_run

from mixle.data.teacher import messages
from mixle.data.teacher.batch_ref import BatchRef
from mixle.data.teacher.broker import Broker
from mixle.data.teacher.errors import BrokerUnreachable, GeneratorFailed, LeaderRefused, NoWorker, TeacherError
from mixle.data.teacher.run import ProcessIdentity
from mixle.data.teacher.specs import BatchConfig, TensorSpec
from mixle.data.teacher.stats_client import StatsClient
from mixle.data.teacher.student import StudentClient
from mixle.data.teacher.worker import Worker


@pytest.fixture
def run():
    with teacher_run() as run:
        yield run


def counting():
    numbers = itertools.count()
    return lambda model_id, model_cfg: sample(next(numbers))


def generations():
    """A generator whose samples tell the configuration of the model."""
    return lambda model_id, model_cfg: sample(-1 if model_cfg is None else model_cfg["number"])


# ---- samples


def test_a_sample_is_read_where_the_teacher_wrote_it(run):
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 4, CONFIG, **run.client) as client:
        with client.request_sample(5000) as ref:
            tensors = ref.tensors()
            assert tensors["x"].tolist() == [0.0, 0.0, 0.0] and tensors["x"].dtype == torch.float32
            assert tensors["y"].item() == 0 and tensors["y"].shape == ()
            assert ref.generation == 0
        with pytest.raises(RuntimeError, match="was released"):
            ref.tensors()


def test_every_sample_is_served_once_while_slots_are_used_again(run):
    run.start_broker()
    run.start_worker(counting())
    seen = []
    with StudentClient(0, 3, CONFIG, **run.client) as client:
        for _ in range(50):
            ref = client.request_sample(5000)
            seen.append(ref.tensors()["y"].item())
            client.release_slot(ref.slot_id)
    assert len(set(seen)) == 50


def test_samples_of_two_clients_do_not_mix_though_neither_said_hello(run):
    run.start_broker()
    run.start_worker(counting())
    seen = []
    with StudentClient(0, 2, CONFIG, **run.client) as one, StudentClient(1, 2, CONFIG, **run.client) as other:
        for client in [one, other] * 20:
            with client.request_sample(5000) as ref:
                seen.append(ref.tensors()["y"].item())
    assert len(set(seen)) == 40


def test_a_batch_is_one_strided_tensor_over_the_slots(run):
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 8, CONFIG, **run.client) as client:
        with client.request_batch(4, 5000) as batch:
            assert isinstance(batch, BatchRef) and len(batch) == 4
            x, y = batch.tensors()["x"], batch.tensors()["y"]
            assert x.shape == (4, 3) and y.shape == (4,)
            assert x.data_ptr() % 64 == 0 and x[1].data_ptr() - x[0].data_ptr() == y[1].data_ptr() - y[0].data_ptr()
            assert torch.equal(x, y.float()[:, None].expand(4, 3))
            kept = batch.copy()
            out = {"x": torch.empty(4, 3), "y": torch.empty(4, dtype=torch.int64)}
            assert batch.copy(out=out)["x"] is out["x"]
            values = y.tolist()
        assert kept["y"].tolist() == out["y"].tolist() == values


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"x": torch.empty(3)}, r"out has the names \['x'\]; the samples have \['x', 'y'\]"),
        ({"x": torch.empty(2), "y": torch.tensor(0)}, r"out\['x'\] is torch.float32 of shape \(2,\)"),
        ({"x": torch.empty(3), "y": torch.tensor(0.0)}, r"out\['y'\] is torch.float32"),
    ],
)
def test_a_copy_into_tensors_that_do_not_fit_is_refused(run, out, message):
    run.start_broker()
    run.start_worker(counting())
    with (
        StudentClient(0, 1, CONFIG, **run.client) as client,
        client.request_sample(5000) as ref,
        pytest.raises(ValueError, match=message),
    ):
        ref.copy(out=out)


def test_what_is_held_stays_readable_after_the_client_is_closed(run):
    run.start_broker()
    run.start_worker(counting())
    client = StudentClient(0, 2, CONFIG, **run.client)
    ref = client.request_sample(5000)
    tensors = ref.tensors()
    client.close()
    gc.collect()
    assert tensors["x"].tolist() == [0.0, 0.0, 0.0]
    ref.release()


def test_sizes_do_not_change_within_a_client(run):
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 8, CONFIG, **run.client) as client:
        client.request_sample(5000).release()
        with pytest.raises(ValueError, match="size=4: this client has asked for 1 at a time"):
            client.request_batch(4)


def test_a_batch_larger_than_the_slots_is_refused(run):
    with (
        StudentClient(0, 8, CONFIG, **run.client) as client,
        pytest.raises(ValueError, match="size=9 exceeds slot_count=8"),
    ):
        client.request_batch(9)


def test_a_slot_is_released_once(run):
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        ref = client.request_sample(5000)
        client.release_slot(ref.slot_id)
        with pytest.raises(ValueError, match=f"slot_id={ref.slot_id} is not held"):
            client.release_slot(ref.slot_id)


def test_a_sample_that_was_released_by_its_slot_frees_nobody_elses(run):
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        with client.request_sample(5000) as first:
            client.release_slot(first.slot_id)
            others = [client.request_sample(5000) for _ in range(2)]
            assert first.slot_id in [other.slot_id for other in others]
        assert client.request_sample(50) is None  # both slots are still held
        for other in others:
            other.release()


def test_a_client_that_was_interrupted_anywhere_serves_again(run):
    run.start_broker()
    run.start_worker(counting())
    seen = []

    class Interrupted(BaseException):
        """Ctrl-C, at a place of the test's choice."""

    with StudentClient(0, 4, CONFIG, **run.client) as client:
        for name in ("_send", "_attend", "_place", "_look_at"):
            session = client._desk.session(5.0)

            def interrupt(*args, **kwargs):
                raise Interrupted

            setattr(session, name, interrupt)
            with pytest.raises(Interrupted):
                for _ in range(50):
                    with client.request_sample(5000) as ref:
                        seen.append(ref.tensors()["y"].item())
            with client.request_sample(5000) as ref:
                seen.append(ref.tensors()["y"].item())
    assert len(set(seen)) == len(seen)


def test_samples_first_read_in_inference_mode_can_be_trained_on_later(run):
    run.start_broker()
    run.start_worker(counting())
    weight = torch.ones(3, requires_grad=True)
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        with torch.inference_mode(), client.request_sample(5000) as ref:
            ref.tensors()
        with client.request_sample(5000) as ref:
            (weight * ref.tensors()["x"]).sum().backward()


# ---- the fence


def test_no_sample_of_an_older_model_is_served_after_the_switch(run):
    run.start_broker()
    run.start_worker(generations())
    with StudentClient(0, 16, CONFIG, **run.client) as client:
        for number in range(1, 40):
            generation = client.set_model("m", {"number": number})
            assert generation == client.generation == client.generation_value.value == number
            for _ in range(number % 3):
                with client.request_sample(5000) as ref:
                    assert ref.generation == generation
                    assert ref.tensors()["y"].item() == number


def test_another_rank_hears_of_the_switch(run):
    run.start_broker()
    run.start_worker(generations())
    with StudentClient(0, 2, CONFIG, **run.client) as leader, StudentClient(1, 2, CONFIG, **run.client) as follower:
        follower.start_sub_listener()
        leader.set_model("m", {"number": 7})
        deadline = time.monotonic() + 20
        while follower.generation < 1 and time.monotonic() < deadline:
            os.sched_yield()
        assert follower.generation_value.value == 1
        with follower.request_sample(5000) as ref:
            assert ref.tensors()["y"].item() == 7
        assert follower.hello()["model_cfg"] == {"number": 7}


def test_only_rank_0_leads(run):
    with StudentClient(1, 2, CONFIG, **run.client) as client, pytest.raises(LeaderRefused, match="student_rank=1"):
        client.set_model("m")


def test_a_second_leader_is_refused(run):
    run.start_broker()
    with StudentClient(0, 2, CONFIG, **run.client) as one, StudentClient(0, 2, CONFIG, **run.client) as two:
        one.set_model("m")
        with pytest.raises(LeaderRefused):
            two.set_model("n")


def test_a_broker_that_lost_its_directory_is_an_error_by_the_deadline_until_the_leader_switches(tmp_path):
    ends = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
    client = {"frontend_endpoint": ends[0], "control_endpoint": ends[2], "control_pub_endpoint": ends[3]}

    def broker(name):
        return Broker(*ends, insecure=True, heartbeat_s=0.05, directory=tmp_path / name)

    first = broker("first").start()
    with (
        Worker(generations(), 4096, ends[1], ends[3], insecure=True),
        StudentClient(0, 2, CONFIG, insecure=True, deadline_s=1.0, **client) as student,
    ):
        for number in range(3):
            student.set_model("m", {"number": number})
        student.request_sample(20_000).release()
        first.stop()
        with broker("second"):
            with pytest.raises(TeacherError, match=r"generation 3 was known here.*set_model again"):
                for _ in range(40):
                    try:
                        student.request_sample(500)
                    except TeacherError as error:
                        if "not one of this run" not in str(error):
                            raise
            assert student.set_model("m", {"number": 9}) == 4
            with student.request_sample(20_000) as ref:
                assert ref.tensors()["y"].item() == 9
            with StudentClient(1, 2, CONFIG, insecure=True, **client) as fresh, fresh.request_sample(20_000) as ref:
                assert ref.tensors()["y"].item() == 9


def test_a_model_id_is_kept_whole_or_refused_with_the_limit(run):
    run.start_broker()
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        client.set_model("m" * 1024)
        assert client.hello()["model_id"] == "m" * 1024
        with pytest.raises(ValueError, match="1024"):
            client.set_model("m" * 1025)


# ---- what goes wrong


def test_a_generator_that_raises_is_heard_at_the_student(run):
    def broken(model_id, model_cfg):
        raise ZeroDivisionError("no teacher today")

    run.start_broker(max_tries=2)
    run.start_worker(broken)
    with (
        StudentClient(0, 2, CONFIG, **run.client) as client,
        pytest.raises(GeneratorFailed, match=r"in 2 tries.*: .*no teacher today"),
    ):
        client.request_sample(20_000)


@pytest.mark.parametrize("size", [0, 19, 21, 4096])
def test_bytes_that_are_too_many_or_too_few_fail_the_order_and_nothing_else(run, size):
    answers = itertools.cycle([bytes(size), CONFIG.encode(**sample(5))])
    run.start_broker(max_tries=1)
    run.start_worker(lambda model_id, model_cfg: next(answers))
    served = failed = 0
    with StudentClient(0, 4, CONFIG, **run.client) as client:
        while not (served > 3 and failed):
            try:
                with client.request_sample(20_000) as ref:
                    assert ref.tensors()["y"].item() == 5
                    served += 1
            except GeneratorFailed as error:
                assert "20" in str(error)
                failed += 1


def test_a_dead_broker_costs_no_more_than_the_time_out_asked_for(run):
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        begun = time.monotonic()
        assert client.request_sample(timeout_ms=100) is None
        assert time.monotonic() - begun < 10


def test_a_broker_that_is_missing_for_the_deadline_is_named(run):
    with (
        StudentClient(0, 2, CONFIG, deadline_s=0.2, **run.client) as client,
        pytest.raises(BrokerUnreachable, match=f"{run.frontend} within 0.2 s"),
    ):
        client.request_sample(60_000)


def test_time_outs_add_up_to_the_deadline(run):
    with StudentClient(0, 2, CONFIG, deadline_s=0.3, **run.client) as client, pytest.raises(BrokerUnreachable):
        for _ in range(100):
            assert client.request_sample(timeout_ms=50) is None


def test_a_missing_broker_is_reported_with_the_whole_time_it_was_tried_for(run):
    with (
        StudentClient(0, 2, CONFIG, deadline_s=0.3, **run.client) as client,
        pytest.raises(BrokerUnreachable) as missing,
    ):
        for _ in range(1_000):
            assert client.request_sample(70) is None
    assert str(missing.value).startswith(f"no broker answered at {run.frontend} within 0.3 s: nothing listens there")
    assert "0.3 s" not in str(missing.value).partition("0.3 s")[2]


def test_a_leader_that_forgot_the_control_endpoint_of_a_distant_broker_is_told(run):
    ends = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
    with (
        Broker(*ends, insecure=True),
        StudentClient(0, 2, CONFIG, ends[0], control_pub_endpoint=ends[3], insecure=True, deadline_s=0.5) as client,
        pytest.raises(BrokerUnreachable, match=f"control_endpoint is a socket of this host, .*{ends[0]}"),
    ):
        client.set_model("a")


def test_a_model_that_nobody_serves_is_an_error_that_says_who_serves_what(run):
    run.start_broker()
    run.start_worker(counting(), patterns=("other*",), worker_id="w1")
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        client.set_model("m")
        client._desk.deadline_s = 0.1
        with pytest.raises(NoWorker, match=r"model 'm' \(generation 1\).*w1 .*other\*"):
            client.request_sample(60_000)


def test_workers_that_make_smaller_samples_are_an_error_with_both_sizes_and_one_that_fits_is_enough(run):
    broker = run.start_broker()
    run.start_worker(counting(), slot_size=19)
    run.start_worker(counting(), slot_size=7)
    until(lambda: broker.stats.workers_serving == 2, "the registration of both")
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        client.hello()
        client._desk.deadline_s = 0.1
        with pytest.raises(
            NoWorker, match=r"a sample has 20 bytes, and .* make at most 19: start them with slot_size=20"
        ):
            client.request_sample(60_000)
        client._desk.deadline_s = 30.0
        run.start_worker(counting(), slot_size=20)
        with client.request_sample(30_000) as ref:
            assert ref.generation == 0


def test_a_slow_generator_is_no_missing_worker(run):
    go = threading.Event()

    def slow(model_id, model_cfg):
        go.wait(20)
        return sample(3)

    run.start_broker()
    run.start_worker(slow)
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        client.hello()
        client._desk.deadline_s = 0.1
        assert client.request_sample(timeout_ms=400) is None
        go.set()
        with client.request_sample(20_000) as ref:
            assert ref.tensors()["y"].item() == 3


def test_slots_that_the_reader_never_released_are_named_by_the_deadline(run):
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 1, CONFIG, **run.client) as client:
        held = client.request_sample(20_000)
        assert held is not None
        client._desk.deadline_s = 0.1
        with pytest.raises(TeacherError, match="all 1 slots are held by the reader"):
            client.request_sample(20_000)


def test_slots_that_do_not_fit_are_refused_at_construction_with_both_sizes(run):
    huge = BatchConfig([TensorSpec("x", (2**34,), "uint8")])
    with pytest.raises(OSError, match=r"need \d{13,} bytes; /dev/shm has \d+ of \d+ free"):
        StudentClient(0, 60, huge, **run.client)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"student_rank": -1}, ValueError, "student_rank=-1"),
        ({"student_rank": True}, TypeError, "student_rank=True"),
        ({"slot_count": 0}, ValueError, "slot_count=0"),
        ({"batch_config": 5}, TypeError, "batch_config=5"),
        ({"deadline_s": 0}, ValueError, r"deadline_s=0"),
        ({"medium": "disk"}, ValueError, "medium='disk'"),
        ({"frontend_endpoint": "tcp://127.0.0.1:5"}, ValueError, "insecure=True"),
        ({"generation_value": 3}, TypeError, "generation_value=3"),
        ({"directory": ""}, ValueError, "directory=''"),
        ({"data_port": 5000}, ValueError, "data_port=5000 is where samples come in over the network; ipc"),
        ({"data_port": 0}, ValueError, "data_port=0 must be at least 1"),
        ({"data_port": True}, TypeError, "data_port=True"),
        ({"data_port": (9, 5)}, ValueError, r"data_port=\(9, 5\) must be \(lowest, highest\)"),
        ({"data_port": (1, 2, 3)}, ValueError, r"data_port=\(1, 2, 3\)"),
        ({"on_event": 3}, TypeError, "on_event=3"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_by_name(run, change, error, message):
    arguments = {"student_rank": 0, "slot_count": 2, "batch_config": CONFIG, **run.client, **change}
    with pytest.raises(error, match=message):
        StudentClient(**arguments)


# ---- what is left behind


def serve_one(run):
    """Serve another client first: all threads of the broker and the worker run from then on."""
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        client.request_sample(20_000).release()


def test_a_closed_client_leaves_neither_memory_nor_thread(run):
    serve_one(run)
    running = set(threading.enumerate())
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        client.request_sample(20_000).release()
        (name,) = run.segments()
        assert name.startswith(f"mx{client.hello()['run_id']}-{os.getpid():x}-")
    assert run.segments() == set() and set(threading.enumerate()) <= running
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.request_sample()


def test_a_client_that_is_dropped_leaves_neither_memory_nor_thread(run):
    serve_one(run)
    running = set(threading.enumerate())
    client = StudentClient(0, 2, CONFIG, **run.client)
    client.request_sample(20_000).release()
    gone = weakref.ref(client)
    del client
    assert gone() is None
    assert run.segments() == set() and set(threading.enumerate()) <= running


def test_a_client_is_refused_in_a_fork_of_its_process_and_survives_there(run):
    run.start_broker()
    run.start_worker(counting())
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        client.request_sample(20_000).release()
        child = os.fork()
        if child == 0:
            try:
                client.request_sample()
            except RuntimeError as error:
                os._exit(0 if "make a new one in the child" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        client.request_sample(20_000).release()


def test_a_file_of_slots_serves_as_shared_memory_does(run):
    run.start_broker()
    run.start_worker(counting())
    before = run.segments()
    with StudentClient(0, 2, CONFIG, medium="file", **run.client) as client, client.request_sample(20_000) as ref:
        assert ref.tensors()["x"].tolist() == [0.0] * 3
        assert run.segments() == before


def test_broker_worker_and_student_agree_on_a_directory_that_is_not_the_default(run, tmp_path):
    directory = tmp_path / "t"
    with (
        Broker(directory=directory, heartbeat_s=0.05),
        Worker(counting(), 4096, directory=directory),
        StudentClient(0, 2, CONFIG, medium="file", directory=directory) as client,
        client.request_sample(20_000) as ref,
    ):
        assert ref.tensors()["x"].tolist() == [0.0] * 3
        assert [path.name for path in (directory / "slots").iterdir()] == [client.hello()["buf_name"].lstrip("/")]
        assert not os.path.exists(os.environ["MIXLE_TEACHER_DIR"])


def test_a_worker_of_another_host_sends_over_the_network():
    ends = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
    with (
        Broker(*ends, insecure=True, heartbeat_s=0.05),
        Worker(counting(), 4096, ends[1], ends[3], insecure=True, host_id="0" * 16),
        StudentClient(0, 4, CONFIG, ends[0], ends[2], ends[3], insecure=True) as client,
    ):
        client.set_model("m")
        seen = []
        for _ in range(20):
            with client.request_sample(20_000) as ref:
                assert ref.tensors()["x"].tolist() == [float(ref.tensors()["y"])] * 3
                seen.append(ref.tensors()["y"].item())
        assert len(set(seen)) == 20


def loopback(**options):
    """A broker that is reached by TCP, and the arguments of clients that find it."""
    ends = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
    client = {"frontend_endpoint": ends[0], "control_endpoint": ends[2], "control_pub_endpoint": ends[3]}
    return Broker(*ends, insecure=True, heartbeat_s=0.05, **options), {**client, "insecure": True}


def loses_samples(broker):
    """A worker of another host that says that it has sent what it never made, once."""
    identity = ProcessIdentity("0" * 16, 1, 1)
    with RawWorker(broker.endpoints.backend, slot_size=4096, identity=identity) as worker:
        pieces = worker.work().pieces
        worker.report(pieces)
        worker.beat()
        worker.send(messages.Bye())
    return pieces


def test_samples_that_were_lost_on_their_way_are_ordered_again():
    broker, client = loopback(timeout_s=1.0)
    with broker, StudentClient(0, 1, CONFIG, **client) as student:
        until(lambda: student.request_sample(10) is None and broker.stats.queued == 1, "an order")
        [lost] = loses_samples(broker)
        ends = broker.endpoints
        with (
            Worker(counting(), 4096, ends.backend, ends.control_pub, insecure=True, host_id="0" * 16),
            student.request_sample(30_000) as ref,
        ):
            assert ref.slot_id == lost.first_slot and ref.tensors()["y"].item() == 0


def test_what_an_earlier_broker_said_had_come_is_no_loss_for_the_next():
    ends = [f"tcp://127.0.0.1:{port}" for port in free_ports(4)]
    client = {"frontend_endpoint": ends[0], "control_endpoint": ends[2], "control_pub_endpoint": ends[3]}
    options = {"insecure": True, "heartbeat_s": 0.05, "timeout_s": 0.3}
    first = Broker(*ends, **options).start()
    with StudentClient(0, 2, CONFIG, insecure=True, **client) as student:
        until(lambda: student.request_sample(10) is None and first.stats.queued == 2, "orders")
        loses_samples(first)
        until(lambda: student.request_sample(10) is None and first.stats.queued == 1, "the word of the lost one")
        first.stop()
        with Broker(*ends, **options) as second:
            until(lambda: student.request_sample(10) is None and second.stats.queued == 2, "the orders again")
            assert student.request_sample(1000) is None
            with Worker(counting(), 4096, ends[1], ends[3], insecure=True), student.request_sample(30_000) as ref:
                assert ref.tensors()["y"].item() >= 0


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
@pytest.mark.parametrize("host_id", [None, "0" * 16])
def test_a_broker_is_reached_by_ipv6(host_id):
    ends = [f"tcp://[::1]:{port}" for port in free_ports(4)]
    with (
        Broker(*ends, insecure=True),
        Worker(counting(), 4096, ends[1], ends[3], insecure=True, host_id=host_id),
        StudentClient(0, 2, CONFIG, ends[0], ends[2], ends[3], insecure=True) as student,
        StatsClient(ends[0]) as stats,
    ):
        assert student.set_model("m") == 1
        student.request_sample(20_000).release()
        assert stats.ask().workers_serving == 1


def test_samples_that_are_lost_every_time_are_an_error_and_the_next_call_orders_anew():
    broker, client = loopback(timeout_s=0.2)
    with broker, StudentClient(0, 1, CONFIG, **client) as student:
        for _ in range(2):
            for _ in range(3):
                until(lambda: student.request_sample(10) is None and broker.stats.queued == 1, "an order")
                loses_samples(broker)
            with pytest.raises(GeneratorFailed, match=r"in 3 tries.*: .*sent slot 0, and no such sample came"):
                student.request_sample(30_000)


def test_samples_come_in_at_the_port_that_was_asked_for_and_one_in_use_is_named():
    [port] = free_ports(1)
    broker, client = loopback()
    ends = broker.endpoints
    with (
        broker,
        Worker(counting(), 4096, ends.backend, ends.control_pub, insecure=True, host_id="0" * 16),
        StudentClient(0, 1, CONFIG, data_port=port, **client) as student,
    ):
        student.request_sample(30_000).release()
        with (
            StudentClient(1, 1, CONFIG, data_port=port, **client) as other,
            pytest.raises(OSError, match=rf"data_port={port} is in use at tcp://127.0.0.1; give another"),
        ):
            other.hello()
        with StudentClient(1, 1, CONFIG, data_port=(port, min(port + 50, 65_535)), **client) as other:
            other.request_sample(30_000).release()
        with socket.socket() as probe:
            probe.connect(("127.0.0.1", port))


def test_a_restarted_broker_is_told_what_is_outstanding(run):
    go = threading.Event()

    def gated(model_id, model_cfg):
        go.wait(20)
        return sample(9)

    broker = run.start_broker()
    run.start_worker(gated)
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        client.set_model("m")
        assert client.request_sample(timeout_ms=100) is None
        broker.stop()
        run.start_broker()
        go.set()
        with client.request_sample(20_000) as ref:
            assert ref.generation == 1 and ref.tensors()["y"].item() == 9
        assert client.set_model("n") == 2
