"""A policy as one file that needs no Rookery: ONNX, or a program of `torch.export`.

Written is what `graph.py` describes, with a description of its inputs and outputs inside. Every file is run before it
is written, on random observations, and has to act as the policy does (`parity.py`). A file is complete or absent.

Neither format is read here from disk. What is written has no pickle and no names of files of this machine in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rookery.core.errors import RookeryError, StorageError, UsageError
from rookery.core.frames import with_frames
from rookery.play.graph import START, PolicyGraph, Port
from rookery.play.parity import Arrays, Runner, largest_difference
from rookery.play.policy import Policy
from rookery.storage import folder as folders
from rookery.storage.folder import run_of

Format = Literal["onnx", "torch"]
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
OPSET = 18  # of ONNX: what every runtime since 2023 reads
ROWS = 160  # observations that a file is tried on
DESCRIPTION = "rookery.json"  # the description, in a file of torch; in ONNX it is metadata
_LEFT_OUT = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")  # they name files


@dataclass(frozen=True)
class Exported:
    """A file that was written. It can be given wherever a path is expected."""

    path: Path
    format: str
    checkpoint: str
    env_steps: int  # of the checkpoint
    inputs: list[Port]
    outputs: list[Port]
    rows: int  # observations on which it was compared with the policy
    difference: float  # the largest there was, as a share of an output's size

    def __fspath__(self) -> str:
        return str(self.path)


def export(policy: Policy, out: Path | None = None, format: Format = "onnx") -> Exported:
    """Write a policy as one file. `out` None: `export/<checkpoint>.onnx`, or `.pt2`, in its run folder."""
    if format not in SUFFIXES:
        raise UsageError(f"format={format!r} is not a choice; format is {' or '.join(map(repr, SUFFIXES))}")
    suffix = SUFFIXES[format]
    if out is not None and out.suffix != suffix:
        raise UsageError(f"{out}: a file of format {format!r} ends in {suffix}")
    if format == "onnx":
        _onnx()  # before the networks are traced, so that a missing package is reported first
    graph = PolicyGraph(policy)
    program = _program(policy, graph)
    data, runner = (_as_onnx if format == "onnx" else _as_torch)(program, graph, _described(policy, graph))
    difference = largest_difference(policy, graph, runner, ROWS)
    path = _written(policy, out, suffix, data)
    return Exported(path, format, policy.path.name, policy.env_steps, graph.inputs, graph.outputs, ROWS, difference)


def _written(policy: Policy, out: Path | None, suffix: str, data: bytes) -> Path:
    if out is None:
        return folders.store(run_of(policy.path), f"export/{policy.path.name}{suffix}", data)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror or error}") from error
    return folders.store(out.parent, out.name, data)


class _ByName(nn.Module):
    """The graph with an argument for each input: torch mixes up the entries of a dict that comes in another order."""

    def __init__(self, graph: PolicyGraph):
        super().__init__()
        names = [port.name for port in graph.inputs]

        def forward(*args: torch.Tensor, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            assert not args
            return graph({name: inputs[_identifier(name)] for name in names})

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        arguments = [inspect.Parameter(_identifier(name), kind) for name in names]
        forward.__signature__ = inspect.Signature(arguments)  # type: ignore[attr-defined]
        self.forward = forward


def _identifier(name: str) -> str:
    """As the argument of a function is called: "arm.angle" is arm_angle."""
    return re.sub(r"\W", "_", name)


def _program(policy: Policy, graph: PolicyGraph) -> torch.export.ExportedProgram:
    example = {_identifier(name): x for name, x in graph.example(3).items()}  # of 0 or 1 rows it would be a constant
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad(), _silent():
            program = torch.export.export(
                _ByName(graph), (), example, dynamic_shapes={name: {0: batch} for name in example}, strict=False
            )
    except RookeryError:
        raise
    except Exception as error:
        raise UsageError(_refusal(policy.config.net.module, error)) from error
    program.example_inputs = None  # a pickle, otherwise
    for node in program.graph.nodes:
        for name in _LEFT_OUT:
            node.meta.pop(name, None)
    return program


def _as_torch(program: Any, graph: PolicyGraph, described: dict[str, Any]) -> tuple[bytes, Runner]:
    buffer = io.BytesIO()
    with _silent():
        torch.export.save(program, buffer, extra_files={DESCRIPTION: json.dumps(described, indent=2)})
        data = buffer.getvalue()
        module = torch.export.load(io.BytesIO(data)).module()

    def run(inputs: Arrays) -> Arrays:
        with torch.no_grad():
            outputs = module(
                **{_identifier(name): torch.from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()}
            )
        return {name: x.numpy() for name, x in outputs.items()}

    return data, run


def _as_onnx(program: Any, graph: PolicyGraph, described: dict[str, Any]) -> tuple[bytes, Runner]:
    onnx, runtime = _onnx()
    names = [port.name for port in graph.inputs], [port.name for port in graph.outputs]
    with _silent():
        made = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, external_data=False, verbose=False, input_names=names[0],
            output_names=names[1],
        )  # fmt: skip
    assert made is not None
    model = made.model_proto
    _clean(model)
    model.producer_name, model.producer_version = "rookery", described["rookery"]
    onnx.helper.set_model_props(
        model, {name: x if isinstance(x, str) else json.dumps(x) for name, x in described.items()}
    )
    onnx.checker.check_model(model, full_check=True)
    data = model.SerializeToString()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return data, lambda inputs: dict(zip(names[1], session.run(names[1], inputs)))


def _clean(model: Any) -> None:
    """Without what names files of this machine; the batch axis has a name."""
    graph = model.graph
    symbols = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    for value in (*graph.input, *graph.output, *graph.value_info):
        del value.metadata_props[:]
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in symbols:
                dim.dim_param = "batch"
    for node in (*graph.node, *(node for function in model.functions for node in function.node)):
        del node.metadata_props[:]
        node.doc_string = ""
    for each in (*graph.initializer, graph, *model.functions):
        del each.metadata_props[:]
    graph.name = "policy"


def _described(policy: Policy, graph: PolicyGraph) -> dict[str, Any]:
    """What a program that has only this file needs to know."""
    from rookery import __version__

    config, action = policy.config, policy.spec.action
    described = {
        "rookery": __version__, "recipe": config.recipe, "algorithm": config.algorithm, "env": policy.spec.id,
        "env_steps": str(policy.env_steps), "checkpoint": policy.path.name,
        "inputs": [_told(port) for port in graph.inputs], "outputs": [_told(port) for port in graph.outputs],
        "action": {name: x for name, x in dataclasses.asdict(action).items() if x not in ((), 0)},
        "state": {name: f"next_{name}" for name in graph.state},
    }  # fmt: skip
    if graph.state:
        described["state_rule"] = (
            f"begin with zeros and {START} true; then give back each output next_X as X; {START} true at the first "
            "observation of every further episode"
        )
    if config.env.startswith("ALE/"):
        described["atari"] = dataclasses.asdict(config.atari)
    return described


def _told(port: Port) -> dict[str, Any]:
    return {"name": port.name, "dtype": port.dtype, "shape": ["batch", *port.shape], "about": port.about}


def _onnx() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError as error:
        raise UsageError(f"an ONNX file needs {error.name}: pip install 'rookery[onnx]'") from error
    return onnx, onnxruntime


def _refusal(module: str, error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    words = f"cannot be exported: torch.export raised {type(error).__name__}: {line}"
    if not module:
        return f"these networks {words}"
    rule = "in what is exported no branch and no shape may depend on values or on the number of rows"
    return with_frames(f"torso {module!r} {words}; {rule}", error)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """torch tells of packages that are absent and of its own deprecations."""
    logger = logging.getLogger("torch")
    before = {each: each.level for each in (logger, logging.getLogger("torch.onnx"))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in before:
            each.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for each, level in before.items():
                each.setLevel(level)
