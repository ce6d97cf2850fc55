"""Join the run at an address, say so, and train until a signal ends the process."""

from __future__ import annotations

import signal
import sys
import time

import numpy as np

from mixle.diloco.algorithm import DiLoCo
from mixle.diloco.session import Session

if __name__ == "__main__":
    address = sys.argv[1]
    arrays = {"w": np.zeros(4, np.float32)}
    with Session(arrays, algorithm=DiLoCo(50, 1), mailbox=address, learner_id="n0", poll_interval=0.05) as session:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("joined", flush=True)
        while True:
            arrays["w"] += 1.0
            session.step(1)
            time.sleep(0.01)
