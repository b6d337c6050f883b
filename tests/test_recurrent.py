"""Networks with a memory: rows of time, restarts, and the numpy twin."""

import numpy as np
import pytest
import torch

from tianji.recurrent import NumpyRecurrent, Recurrent


def network(inputs=5, hidden=8, outputs=3, seed=0):
    module = Recurrent(inputs, hidden, outputs)
    module.initialise(np.random.default_rng(seed), last=1.0)
    with torch.no_grad():  # biases, too, must be in the right places
        for name, parameter in module.named_parameters():
            if "bias" in name:
                parameter.copy_(
                    torch.from_numpy(np.random.default_rng(1).normal(size=len(parameter)))
                )
    return module


def numbers(*shape, seed=2):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def by_cell(module, x, state, restart):
    """The equations, row by row."""
    weights = dict(module.memory.named_parameters())
    outputs = []
    for row, again in zip(x, restart, strict=True):
        state = torch.where(again[:, None], torch.zeros_like(state), state)
        row = torch.relu(row @ module.encoder.weight.T + module.encoder.bias)
        a = (row @ weights["weight_ih_l0"].T + weights["bias_ih_l0"]).chunk(3, -1)
        b = (state @ weights["weight_hh_l0"].T + weights["bias_hh_l0"]).chunk(3, -1)
        reset, keep = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
        new = torch.tanh(a[2] + reset * b[2])
        state = (1 - keep) * new + keep * state
        outputs.append(state @ module.head.weight.T + module.head.bias)
    return torch.stack(outputs), state


@pytest.mark.parametrize("rows", [[], [0], [3], [0, 1, 2, 5], [5]])
def test_all_rows_at_once_are_the_equations_row_by_row(rows):
    module, x, state = network(), numbers(6, 4, 5), numbers(4, 8)
    restart = torch.zeros(6, 4, dtype=torch.bool)
    for t in rows:
        restart[t, t % 4] = True
    outputs, last = module(x, state, restart)
    expected, expected_last = by_cell(module, x, state, restart)
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(last, expected_last, atol=1e-6, rtol=1e-5)


def test_nothing_before_a_restart_is_remembered():
    module, x = network(), numbers(6, 2, 5)
    restart = torch.zeros(6, 2, dtype=torch.bool)
    restart[3, 0] = True
    one, _ = module(x, numbers(2, 8), restart)
    other, _ = module(torch.cat([numbers(3, 2, 5, seed=9), x[3:]]), numbers(2, 8, seed=8), restart)
    torch.testing.assert_close(one[3:, 0], other[3:, 0])
    assert not torch.allclose(one[3:, 1], other[3:, 1])


def test_no_gradient_flows_through_a_restart():
    module, x = network(), numbers(6, 1, 5).requires_grad_()
    restart = torch.zeros(6, 1, dtype=torch.bool)
    restart[3] = True
    outputs, _ = module(x, numbers(1, 8), restart)
    outputs[5].sum().backward()
    assert not x.grad[:3].any()
    assert x.grad[3:].any(dim=-1).all()


def test_numpy_gives_what_torch_gives():
    module, x, state = network(7, 16, 4), numbers(5, 6, 7), numbers(6, 16)
    twin = NumpyRecurrent("q")
    twin.load({f"q.{name}": p.detach().numpy() for name, p in module.named_parameters()})
    expected, last = module(x, state, torch.zeros(5, 6, dtype=torch.bool))
    memory = state.numpy()
    for row, answer in zip(x.numpy(), expected, strict=True):
        before = memory.copy()
        outputs, following = twin(row, memory)
        np.testing.assert_allclose(outputs, answer.detach().numpy(), atol=1e-5)
        np.testing.assert_array_equal(memory, before)
        memory = following
    np.testing.assert_allclose(memory, last.detach().numpy(), atol=1e-5)


def test_loading_copies_the_params():
    module = network()
    params = {f"q.{n}": p.detach().numpy().copy() for n, p in module.named_parameters()}
    twin = NumpyRecurrent("q")
    twin.load(params)
    x, state = numbers(2, 5).numpy(), numbers(2, 8).numpy()
    before, _ = twin(x, state)
    for array in params.values():
        array += 1
    after, _ = twin(x, state)
    np.testing.assert_array_equal(before, after)


def test_weights_begin_orthogonal_and_equal_for_equal_generators():
    one, other = network(seed=3), network(seed=3)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    for gate in one.memory.weight_hh_l0.detach().split(8):
        torch.testing.assert_close(gate @ gate.T, torch.eye(8), atol=1e-5, rtol=1e-5)
