"""Measures alternatives to this package: JAX's `lax.scan` with jit, and a naive loop compiled by torch.

Neither is a dependency. JAX is measured only if it is installed, the compiled loop only if torch can compile.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bnrnn.bench.layers import Shape, build, draw, step
from bnrnn.bench.timing import NAIVE, Case, Plan, fastest, say

COMPILED_T = 10  # few time steps: torch unrolls the loop and compiles each step


def jax_step(layer: Any, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward pass of one BN-LSTM layer with batch statistics, in compiled jax.lax.scan."""
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    names = ("weight_ih", "weight_hh", "bias", "bn_ih.gamma", "bn_hh.gamma", "bn_c.gamma", "bn_c.beta")
    of_layer = dict(layer.named_parameters())
    parameters = {name: jnp.asarray(of_layer[name].detach().numpy()) for name in names}
    inputs, gradient = (jnp.asarray(v.detach().numpy()) for v in (x, dy))

    def norm(v: Any, gamma: Any) -> Any:
        mean = v.mean(0)
        return gamma * (v - mean) * jax.lax.rsqrt(jnp.square(v - mean).mean(0) + 1e-5)

    def loss(p: dict[str, Any], inputs: Any) -> Any:
        def one(state: tuple[Any, Any], x_t: Any) -> tuple[tuple[Any, Any], Any]:
            h, c = state
            a = (
                norm(h @ p["weight_hh"].T, p["bn_hh.gamma"])
                + norm(x_t @ p["weight_ih"].T, p["bn_ih.gamma"])
                + p["bias"]
            )
            i, f, g, o = jnp.split(a, 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(norm(c, p["bn_c.gamma"]) + p["bn_c.beta"])
            return (h, c), h

        zero = jnp.zeros((inputs.shape[1], gradient.shape[2]))
        return (jax.lax.scan(one, (zero, zero), inputs)[1] * gradient).sum()

    run = jax.jit(jax.grad(loss, argnums=(0, 1) if x.requires_grad else 0))
    return lambda: jax.block_until_ready(run(parameters, inputs))


def first_call(name: str, run: Callable[[], Any]) -> None:
    """Make the first call, which compiles, and print how long it takes."""
    start = time.monotonic()
    run()
    say(f"  first call of {name}: {time.monotonic() - start:.0f} s")


def peer_cases(shapes: dict[str, Shape], plan: Plan) -> Iterator[Case]:
    """One layer of every shape on the CPU, against the engine that `auto` selects."""
    cpu = torch.device("cpu")
    ours = fastest(cpu)
    for key, shape in shapes.items():
        if shape.norm != "batch":
            continue
        one, T = replace(shape, num_layers=1), shape.T if plan.full_length else shape.quick_T
        x, dy = draw(one, T, cpu)
        lstm = build(ours, one, T, cpu)
        runs: dict[str, Callable[[], Any]] = {ours: partial(step, ours, lstm, x, dy)}
        try:
            runs["JAX, lax.scan"] = jax_step(lstm.layers[0], x, dy)  # pyright: ignore[reportIndexIssue]
            first_call("JAX", runs["JAX, lax.scan"])
        except ImportError:
            say("without JAX: it is not installed")
        yield Case("Peers", f"{key}, one layer, T {T}", runs, ours)
        x, dy = draw(one, COMPILED_T, cpu)
        lstm, loop = build(ours, one, COMPILED_T, cpu), build(NAIVE, one, COMPILED_T, cpu)
        compiled: Any = torch.compile(loop)
        runs = {ours: partial(step, ours, lstm, x, dy), "compiled naive loop": partial(step, NAIVE, compiled, x, dy)}
        first_call("the compiled naive loop", runs["compiled naive loop"])
        yield Case("Peers", f"{key}, one layer, T {COMPILED_T}", runs, ours)
