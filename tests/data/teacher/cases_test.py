"""Faults that were seen in a published pipeline of this kind, each with the test that shows the right result here.

=== ======================================================= ============================================================
 #  what was done                                           the test
=== ======================================================= ============================================================
 1  a config whose shapes are lists                         specs_test::test_shapes_are_tuples_however_they_were_given
 2  gradients, shapes () and (0,) in encode                 specs_test::test_samples_of_every_dtype_and_shape_round_trip
                                                            specs_test::test_tensors_that_require_grad_or_are_not_contiguous_are_encoded
 3  too many bytes                                          faults_test::test_bytes_that_are_too_many_or_too_few_fail_the_order_and_leave_every_canary
                                                            network_test::test_what_is_no_ordered_sample_is_dropped_and_the_next_one_taken
 4  too few bytes                                           faults_test::test_bytes_that_are_too_many_or_too_few_fail_the_order_and_leave_every_canary
 5  well-formed messages of wrong types                     broker_test::test_no_message_ends_the_broker_or_the_service_of_honest_peers
                                                            messages_test::test_a_field_of_another_type_or_size_is_refused_by_name
 6  a model that nobody serves                              faults_test::test_a_model_that_nobody_serves_is_named_and_hinders_no_other
 7  completions that overtake acknowledgements              cases_test::test_three_workers_share_the_work_and_no_slot_is_lost
                                                            scheduling_test::test_whatever_happens_no_slot_has_two_writers_and_each_gets_one_final_word
 8  a switch with DataLoader workers                        loader_test::test_no_batch_of_an_older_model_is_handed_out_after_the_switch
                                                            programs_test::test_no_rank_is_handed_a_sample_older_than_what_it_knows_of
 9  a switch under DDP                                      teacher_handle_test::test_after_a_switch_from_another_thread_all_ranks_change_at_one_step
10  the broker killed and restarted                         faults_test::test_a_broker_that_is_away_for_three_seconds_costs_no_sample_and_repeats_none
11  a worker killed while attached                          faults_test::test_the_sample_that_a_worker_died_writing_is_made_whole_by_another
                                                            broker_test::test_a_killed_workers_order_is_given_to_another_at_once
12  a worker that is slow, its order given to another       cases_test::test_a_worker_that_comes_back_after_silence_changes_no_sample_under_its_reader
                                                            slots_test::test_a_late_writer_does_not_touch_a_slot_that_was_handed_on
13  a student killed with orders out                        broker_test::test_a_killed_students_orders_are_dropped_its_segment_deleted_and_the_workers_told
                                                            faults_test::test_a_killed_students_memory_is_gone_and_its_worker_serves_on
14  the trainer killed, broker dead                         dataset_test::test_loader_workers_end_with_a_killed_trainer_though_the_broker_is_dead
15  students that crash in turn                             faults_test::test_students_that_crash_in_turn_leave_no_map_at_the_worker
16  a foreign path, segment or offset                       worker_test::test_a_segment_that_is_not_what_the_run_made_is_refused_with_a_message
                                                            worker_test::test_slots_beyond_the_segment_are_refused
                                                            security_test::test_a_path_instead_of_a_segment_is_refused
17  a DONE of a stranger                                    cases_test::test_a_report_of_work_that_another_has_serves_nobody
18  patterns that blow up, endless queues                   globs_test::test_no_pattern_can_blow_up
                                                            cases_test::test_a_student_cannot_queue_more_than_its_slots
19  4 GiB announced on the network                          network_test::test_an_announced_size_beyond_a_message_ends_the_connection_before_a_byte_of_it_is_read
20  a short time-out with a dead broker                     student_test::test_a_dead_broker_costs_no_more_than_the_time_out_asked_for
                                                            student_test::test_time_outs_add_up_to_the_deadline
21  fork after the parent used its client                   cases_test::test_loader_workers_that_are_forked_after_the_client_was_used_serve
                                                            student_test::test_a_client_is_refused_in_a_fork_of_its_process_and_survives_there
22  stop() while the worker generates                       worker_test::test_a_worker_that_is_stopped_in_its_generator_finishes_the_sample_and_gives_the_rest_back
                                                            worker_test::test_a_signal_lets_the_sample_be_finished_and_the_process_exit_well
23  activations before an in-place change                   activations_test::test_outputs_are_what_the_module_returned_before_a_later_module_changed_it_in_place
                                                            activations_test::test_the_model_has_hooks_only_while_it_is_captured
24  a long model id                                         student_test::test_a_model_id_is_kept_whole_or_refused_with_the_limit
25  a generator that always raises                          faults_test::test_a_generator_that_always_raises_is_called_a_bounded_number_of_times
26  a worker exits while attached                           segment_test::test_a_process_that_attached_takes_nothing_away_however_it_ends
                                                            faults_test::test_new_workers_take_up_what_was_ordered_when_all_were_killed
27  a sample that takes longer than every time-out          cases_test::test_a_worker_whose_sample_takes_longer_than_the_time_out_is_not_lost
28  a second broker                                         broker_test::test_a_second_broker_is_refused_by_the_pid_of_the_first_and_a_killed_one_is_replaced_at_once
29  many workers of 20 ms                                   cases_test::test_all_workers_are_busy_at_once
30  a small /dev/shm                                        student_test::test_slots_that_do_not_fit_are_refused_at_construction_with_both_sizes
                                                            segment_test::test_a_dev_shm_that_others_have_filled_is_a_refusal_and_no_bus_error
31  clients that skip hello                                 student_test::test_samples_of_two_clients_do_not_mix_though_neither_said_hello
=== ======================================================= ============================================================
"""  # noqa: E501  # a name is not broken

from __future__ import annotations

import itertools
import re
import secrets
import signal
import threading
from pathlib import Path

import pytest
from raw_teacher_peers import RawStudent, RawWorker
from teacher_processes import PATTERN, read, teacher_processes, until
from teacher_run import CONFIG, sample, teacher_run
from torch.utils.data import DataLoader

from mixle.data.teacher import messages
from mixle.data.teacher.dataset import DistillIterableDataset
from mixle.data.teacher.stats_client import StatsClient
from mixle.data.teacher.student import StudentClient

TESTS = Path(__file__).parents[2]


@pytest.fixture
def processes():
    with teacher_processes() as run:
        yield run


@pytest.fixture
def run():
    with teacher_run() as run:
        yield run


def statistics(run):
    with StatsClient(run.frontend) as client:
        return client.ask()


def test_each_case_has_a_test():
    assert __doc__ is not None
    assert [int(number) for number in re.findall(r"^ ?(\d+)  ", __doc__, re.MULTILINE)] == list(range(1, 32))
    for module, name in re.findall(r"(\w+_test)::(\w+)", __doc__):
        texts = [path.read_text() for path in TESTS.rglob(f"{module}.py")]
        assert any(f"def {name}(" in text for text in texts), f"{module} has no {name}"


def test_three_workers_share_the_work_and_no_slot_is_lost(processes):
    processes.start("broker")
    for _ in range(3):
        processes.start("worker", argument=0.002)
    seen = []
    with StudentClient(0, 8, PATTERN, **processes.client) as client:
        while len(seen) < 300:
            with client.request_sample(60_000) as ref:
                seen += read(ref.tensors())
        held = [client.request_sample(60_000) for _ in range(8)]
        assert len({ref.slot_id for ref in held}) == 8
        stats = statistics(processes)
    assert len(set(seen)) == 300
    assert len(stats.workers) == 3 and all(worker.completed > 30 for worker in stats.workers)


def test_a_worker_that_comes_back_after_silence_changes_no_sample_under_its_reader(processes):
    processes.start("broker", timeout_s=0.3)
    silent = processes.start("worker", argument=0.02)
    with StudentClient(0, 8, PATTERN, **processes.client) as client:
        seen = []
        with client.request_sample(60_000) as ref:
            seen += read(ref.tensors())
        silent.send_signal(signal.SIGSTOP)
        until(lambda: statistics(processes).lost, "the loss of what the silent worker had")
        processes.start("worker")
        held = []
        for _ in range(30):
            with client.request_sample(60_000) as ref:
                seen += read(ref.tensors())
        held = [client.request_sample(60_000) for _ in range(4)]
        before = [read(ref.copy()) for ref in held]
        silent.send_signal(signal.SIGCONT)
        until(lambda: sum(worker.completed > 1 for worker in statistics(processes).workers) == 2, "the return")
        assert [read(ref.tensors()) for ref in held] == before
        seen += [one for ref in before for one in ref]
        for ref in held:
            ref.release()
        while len(seen) < 80:
            with client.request_sample(60_000) as ref:
                seen += read(ref.tensors())
    assert len(set(seen)) == len(seen)


def test_a_worker_whose_sample_takes_longer_than_the_time_out_is_not_lost(processes):
    processes.start("broker", timeout_s=0.2)
    processes.start("worker", argument=1.0)
    with StudentClient(0, 1, PATTERN, deadline_s=0.5, **processes.client) as client:
        seen = []
        while len(seen) < 2:
            ref = client.request_sample(500)
            if ref is not None:
                seen += read(ref.tensors())
                ref.release()
        stats = statistics(processes)
    assert len(set(seen)) == 2 and len(stats.workers) == 1


def test_a_report_of_work_that_another_has_serves_nobody(run):
    broker = run.start_broker()
    with (
        RawStudent(run.frontend) as student,
        RawWorker(run.backend, worker_id="honest") as honest,
        RawWorker(run.backend, worker_id="thief", patterns=("other",)) as thief,
        RawWorker(run.backend, register=False) as stranger,
    ):
        order = student.order(0)
        (piece,) = honest.work().pieces
        thief.report([piece])
        stranger.report([piece])
        stranger.expect(messages.Who)
        thief.report([piece._replace(ticket=secrets.token_bytes(16))])
        thief.beat()
        student.beat()
        assert broker.stats.completed == 0 and broker.stats.unknown_tickets == 2
        honest.report([piece])
        assert student.expect(messages.Complete).pieces == ((order.order_id, 0, 1),)


def test_a_student_cannot_queue_more_than_its_slots(run):
    broker = run.start_broker()
    with RawStudent(run.frontend, 4) as student:
        student.order(0, 4)
        for slot in itertools.islice(itertools.cycle(range(4)), 200):
            student.order(slot)
        student.order(4)
        student.beat()
        assert broker.stats.queued == 4


def test_loader_workers_that_are_forked_after_the_client_was_used_serve(run):
    run.start_broker()
    numbers = itertools.count()
    run.start_worker(lambda model_id, model_cfg: sample(next(numbers)))
    with StudentClient(0, 2, CONFIG, **run.client) as client:
        client.request_sample(60_000).release()
        dataset = DistillIterableDataset(0, client.generation_value, 4, CONFIG, run.frontend)
        loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
        seen = [y for batch in itertools.islice(loader, 6) for y in batch["y"].tolist()]
        client.request_sample(60_000).release()
    assert len(set(seen)) == 12


@pytest.mark.parametrize("through", ["client", "dataset", "loader"])
@pytest.mark.parametrize("workers", [1, 8, 20])
def test_all_workers_are_busy_at_once(run, through, workers):
    """No sample is made before as many generators as there are workers are at it: a worker too few, and all wait."""
    run.start_broker()
    together = threading.Barrier(workers, timeout=60)

    def generate(model_id, model_cfg):
        together.wait()
        return sample(1)

    for _ in range(workers):
        run.start_worker(generate, prefetch=1)
    count = 2 * workers
    try:
        with StudentClient(0, 32, CONFIG, **run.client) as client:
            dataset = DistillIterableDataset(0, client.generation_value, 32, CONFIG, run.frontend)
            if through == "client":
                for _ in range(count):
                    client.request_sample(60_000).release()
            elif through == "dataset":
                assert len(list(itertools.islice(dataset, count))) == count
            else:
                loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="fork")
                assert len(list(itertools.islice(loader, workers))) == workers
    finally:
        together.abort()
