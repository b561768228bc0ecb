"""A worker that is held up on its way to child_entry until somebody opens the other end of a fifo."""

import os

open(os.environ["ROOKERY_TEST_FIFO"]).close()

if __name__ == "__main__":
    from rookery.processes.child import child_entry

    child_entry()
    raise SystemExit("a worker without a parent went to work")
