"""What a cycle sends: python tests/benchmarks/diloco_bytes.py

N sites train a model of M float32 bytes; in a cycle every fragment is sent once. The counters of the sites' mailboxes
say what went up and came down, beside the bound of N deltas and one commit, (N+1) M up, plus the momentum's own format.
Without joining, which is read once, and without the flush at the end.
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid

import numpy as np

from mixle.diloco import DiLoCo, Session, open_mailbox

CYCLES, SYNC_EVERY, FRAGMENTS, TENSORS, ELEMENTS = 6, 8, 4, 8, 1 << 16


def cycle(sites: int, **algorithm: object) -> tuple[float, float, float]:
    """Return bytes up, bytes down and requests of one cycle of all sites, each in multiples of the model's bytes."""
    url = f"memory://{uuid.uuid4().hex}"
    stores = [open_mailbox(url) for _ in range(sites)]
    chosen = DiLoCo(
        SYNC_EVERY,
        FRAGMENTS,
        overlap_steps=0,
        quorum_size=sites,
        follow=0,
        global_batch_size=sites,
        flush_on_close=False,
        **algorithm,
    )
    meeting = threading.Barrier(sites, timeout=120)
    marks: list[tuple[int, int, int]] = []

    def note() -> None:
        traffic = [store.traffic for store in stores]
        requests = sum(t.puts + t.gets + t.lists + t.deletes for t in traffic)
        marks.append((sum(t.bytes_up for t in traffic), sum(t.bytes_down for t in traffic), requests))

    def site(i: int) -> None:
        rng = np.random.default_rng(i)
        model = {f"tensor{j}": np.zeros(ELEMENTS, np.float32) for j in range(TENSORS)}
        options = {"poll_interval": 0.05, "callbacks": (), "lease_every": 0.5, "lease_timeout": 30.0}
        session = Session(model, algorithm=chosen, mailbox=stores[i], learner_id=f"site-{i}", **options)
        while session.batch_size != 1:  # until every site knows of all others
            time.sleep(0.01)
        for step in range(CYCLES * SYNC_EVERY):
            if step in (SYNC_EVERY, (CYCLES - 1) * SYNC_EVERY) and meeting.wait() == 0:
                note()
            if step in (SYNC_EVERY, (CYCLES - 1) * SYNC_EVERY):
                meeting.wait()
            for array in model.values():
                array += rng.standard_normal(ELEMENTS).astype(np.float32) * np.float32(0.01)
            session.step(1)
        meeting.wait()
        session.close()

    threads = [threading.Thread(target=site, args=(i,)) for i in range(sites)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (up, down, asked), (up_later, down_later, asked_later) = marks
    size, cycles = 4 * TENSORS * ELEMENTS, CYCLES - 2
    return (up_later - up) / size / cycles, (down_later - down) / size / cycles, (asked_later - asked) / cycles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4])
    asked = parser.parse_args()
    print(
        f"M = {4 * TENSORS * ELEMENTS / 1e6:.1f} MB in {FRAGMENTS} fragments; bytes in M per cycle, all sites together"
    )
    formats = {
        "float32": {},
        "float32, momentum BF16": {"momentum_dtype": "BF16"},
        "F4 both ways": {"delta_dtype": "F4", "commit_dtype": "F4", "momentum_dtype": "BF16"},
    }
    for sites in asked.sites:
        for name, dtypes in formats.items():
            up, down, requests = cycle(sites, **dtypes)
            momentum = 0.5 if "momentum_dtype" in dtypes else 1.0
            print(
                f"N={sites}  {name:24s} up {up:6.2f} (bound {sites + 1} + momentum {momentum:g} = "
                f"{sites + 1 + momentum:g})   down {down:6.2f}   {requests:6.0f} requests"
            )


if __name__ == "__main__":
    main()
