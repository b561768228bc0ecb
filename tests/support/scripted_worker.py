"""A worker that does what its start message says, then answers until it is told to stop."""

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time

from rookery.pipes.shm import Segment
from rookery.processes.child import assigned, serve


def stuck_here(tell=lambda: None):
    tell()  # from here on, this function is on the stack
    while True:
        time.sleep(3600.0)


def stuck_in_c(tell):
    tell()
    ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter lock


def body(channel, message, fds):
    if message.get("spare"):
        print("loaded")
        channel.send({"op": "loaded"}, timeout=60)
    message = assigned(channel, message)
    do = message["do"]
    if do == "raise":
        raise ValueError("broken on purpose")
    if do == "fail":
        from rookery.core.errors import EnvError

        raise EnvError("the door is stuck", reason="env_raised")
    if do == "exit":
        print("leaving now")
        os._exit(message["code"])
    if do == "signal":
        os.kill(os.getpid(), message["signal"])
    ready = {"op": "ready", "argv": sys.argv[1:], "path": sys.path, "env": dict(os.environ), "group": os.getpgid(0)}
    if do == "terminate":
        program = subprocess.Popen(["sleep", "3600"])
        program.terminate()
        ready["ended"] = program.wait(60)
    if do == "program":
        ready["program"] = subprocess.Popen(["sleep", "3600"]).pid
    if do == "fork":
        child = os.fork()
        if child == 0:
            stuck_here()
        ready["program"] = child
    if do == "write":
        Segment.attach(fds["memory"], message["size"]).array((message["size"],), "uint8")[:] = 7
    if do == "ignore":  # as a process that cannot be interrupted
        faulthandler.disable()
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
        stuck_here(lambda: channel.send(ready, timeout=60))
    if do == "hang":
        stuck_here(lambda: channel.send(ready, timeout=60))
    if do == "hang_in_c":
        stuck_in_c(lambda: channel.send(ready, timeout=60))
    channel.send(ready, timeout=60)
    if do == "stop_itself":
        os.kill(os.getpid(), signal.SIGSTOP)
    if do == "chatter":
        while True:
            channel.send({"op": "noise", "data": bytes(100_000)}, timeout=3600)
    while True:
        order = channel.recv(timeout=3600)
        if order["op"] == "stop":
            channel.send({"op": "farewell"}, timeout=60)
            return
        channel.send({"op": "echo", "order": order}, timeout=60)


if __name__ == "__main__":
    serve(body)
