"""Numpy and torch give the same answers; the flat optimizer is Adam."""

import numpy as np
import pytest
import torch
from torch import nn

from tianji import networks
from tianji.algorithm import Network
from tianji.distributions import distribution
from tianji.env import Continuous, Discrete, MultiDiscrete
from tianji.errors import Refusal
from tianji.moments import Moments
from tianji.optim import Flat, Optimizer
from tianji.types import leaf


def module_and_params(network, observation, outputs=3):
    (module,) = networks.build(network, observation, outputs)
    networks.initialise(module, np.random.default_rng(0), 1.4, last=1.0)
    for name, p in module.named_parameters():
        if "bias" in name:
            with torch.no_grad():
                p.copy_(torch.linspace(-1, 1, p.numel()))
    params = {f"n.{name}": p.detach().numpy() for name, p in module.named_parameters()}
    return module, params


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shape", [(), (4,), (3, 5)])
@pytest.mark.parametrize("B", [1, 7, 64])
def test_numpy_inference_equals_torch_to_1e_5(activation, shape, B):
    network = Network(hidden=(32, 16), activation=activation)
    observation = leaf(shape, np.float32)
    module, params = module_and_params(network, observation)
    answer = networks.inference(network, observation, module, "n")
    assert isinstance(answer, networks.NumpyMLP)
    answer.load(params)
    x = np.random.default_rng(1).normal(size=(B, *shape)).astype(np.float32)
    np.testing.assert_allclose(
        answer(x), module(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shape", [(4, 84, 84), (96, 96, 3), (84, 84, 12)])
def test_pictures_get_convolutions_and_stay_uint8_until_there(shape):
    network, observation = Network(), leaf(shape, np.uint8)
    assert networks.kind(network, observation) == "cnn"
    module, params = module_and_params(network, observation)
    answer = networks.inference(network, observation, module, "n")
    answer.load(params)
    x = np.random.default_rng(1).integers(0, 255, (2, *shape), dtype=np.uint8)
    expected = module(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(answer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 84, 84), (84, 84, 3)])
def test_bfloat16_chooses_as_float32_does(shape):
    """99 of 100 actions are the same, and values differ by at most 2 % of their spread."""
    observation, rng = leaf(shape, np.uint8), np.random.default_rng(1)
    (module,) = networks.build(Network(), observation, 6)
    networks.initialise(module, rng, 2**0.5, last=1.0)
    params = {f"n.{name}": p.detach().numpy().copy() for name, p in module.named_parameters()}
    # Blocks of random brightness: noise of single pixels looks the same to all filters.
    blocks = [1 if n < 8 else 12 for n in shape]
    coarse = [n // block for n, block in zip(shape, blocks, strict=True)]
    x = rng.integers(0, 256, (400, *coarse), dtype=np.uint8)
    for axis, block in enumerate(blocks):
        x = x.repeat(block, axis=axis + 1)
    answers = []
    for precision in ("float32", "bfloat16"):
        (fresh,) = networks.build(Network(), observation, 6)
        answer = networks.inference(Network(precision=precision), observation, fresh, "n")
        answer.load(params)
        answers.append(answer(x))
    exact, quick = answers
    assert quick.dtype == np.float32
    assert min(np.unique(exact.argmax(1), return_counts=True)[1]) < 400  # not one action for all
    assert (exact.argmax(1) == quick.argmax(1)).mean() >= 0.99
    assert np.abs(exact - quick).max() <= 0.02 * np.ptp(exact)


def test_bfloat16_without_convolutions_is_refused():
    observation = leaf((4,), np.float32)
    (module,) = networks.build(Network(), observation, 2)
    with pytest.raises(Refusal, match="would do nothing"):
        networks.inference(Network(precision="bfloat16"), observation, module, "n")


def test_pictures_that_were_normalised_are_taken_as_they_are():
    """The weights of an inference are scaled for bytes; floats must not be."""
    observation = leaf((4, 84, 84), np.uint8)
    module, params = module_and_params(Network(), observation)
    x = np.random.default_rng(1).normal(size=(2, 4, 84, 84)).astype(np.float32)
    expected = module(torch.from_numpy(x)).detach().numpy()
    answer = networks.inference(Network(), observation, module, "n")
    answer.load(params)
    np.testing.assert_allclose(answer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stack", [(2, 40, 36, 3), (2, 3, 40, 36)])
def test_a_stack_of_pictures_is_a_picture_with_their_channels(stack):
    observation = leaf(stack, np.uint8)
    assert networks.kind(Network(), observation) == "cnn"
    picture = networks.Picture(stack)
    x = np.random.default_rng(0).integers(0, 255, (5, *stack), dtype=np.uint8)
    y = picture(torch.from_numpy(x)).numpy()
    channels = x if stack[1] == 3 else np.moveaxis(x, -1, 2)
    np.testing.assert_allclose(y, channels.reshape(5, 6, 40, 36) / np.float32(255), rtol=1e-6)
    assert picture.channels == 6


@pytest.mark.parametrize("shape", [(4, 84, 84), (4,)])
def test_networks_together_answer_and_learn_as_each_alone(shape):
    observation = leaf(shape, np.uint8 if len(shape) == 3 else np.float32)
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (3, *shape)).astype(np.uint8))
    policy, value = networks.build(Network(), observation, 3, 1)
    parameters = [*{id(p): p for m in (policy, value) for p in m.parameters()}.values()]
    gradients = []
    for answers in ([policy(x), value(x)], networks.together(x, policy, value)):
        loss = answers[0].square().sum() + answers[1].sum()
        gradients.append([*torch.autograd.grad(loss, parameters), *(a.detach() for a in answers)])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_convolutions_over_a_vector_are_refused_with_the_remedy():
    with pytest.raises(Refusal, match=r'network\.kind = "mlp"'):
        networks.kind(Network(kind="cnn"), leaf((4,), np.float32))


def test_our_tanh_has_the_value_and_gradient_of_torch():
    x = torch.linspace(-6, 6, 301, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    networks.tanh(x).square().sum().backward()
    torch.tanh(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)


def test_initialisation_is_orthogonal_and_repeats():
    first, second = nn.Linear(8, 5), nn.Linear(8, 5)
    for module in (first, second):
        networks.initialise(module, np.random.default_rng(3), 1.0, last=2.0)
    assert torch.equal(first.weight, second.weight)
    torch.testing.assert_close(first.weight @ first.weight.T, 4.0 * torch.eye(5))
    assert (first.bias == 0).all()


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
def test_the_flat_optimizer_makes_the_steps_of_torchs_adam(max_norm):
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = Optimizer({"m": ours}, max_norm=max_norm, eps=1e-5)
    adam = torch.optim.Adam(theirs.parameters(), lr=0.01, eps=1e-5)
    for _ in range(20):
        x, y = torch.randn(16, 4), torch.randn(16, 2)
        optimizer.step((ours(x) - y).square().mean(), 0.01, 16)
        adam.zero_grad()
        (theirs(x) - y).square().mean().backward()
        if max_norm:
            nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        adam.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_layer_that_two_modules_share_has_one_place_in_the_buffer():
    shared = nn.Linear(3, 3)
    flat = Flat({"a": nn.Sequential(shared, nn.Linear(3, 1)), "b": nn.Sequential(shared)})
    assert flat.data.numel() == 9 + 3 + 3 + 1
    assert shared.weight.data_ptr() == flat.data.data_ptr()


def test_an_optimizer_goes_on_from_its_state():
    def make():
        torch.manual_seed(1)
        module = nn.Linear(3, 1)
        return module, Optimizer({"m": module}, max_norm=1.0)

    x = torch.ones(4, 3)
    module, optimizer = make()
    for _ in range(3):
        optimizer.step(module(x).square().sum(), 0.1, 4)
    other, again = make()
    again.load_state(optimizer.state())
    for m, o in ((module, optimizer), (other, again)):
        o.step(m(x).square().sum(), 0.1, 4)
    assert torch.equal(module.weight, other.weight)


@pytest.mark.parametrize(
    "action", [Discrete(3), MultiDiscrete((2, 4)), Continuous((-1.0,) * 2, (1.0,) * 2, (2,))]
)
def test_the_learner_scores_a_drawn_action_as_the_actor_did(action):
    over, rng = distribution(action), np.random.default_rng(0)
    output = rng.normal(size=(50, over.width)).astype(np.float32)
    params = {k: np.full(shape, -0.3, np.float32) for k, shape in over.shapes.items()}
    drawn, log_prob = over.sample(output, params, rng)
    tensors = {k: torch.from_numpy(v) for k, v in params.items()}
    logits, chosen = torch.from_numpy(output), torch.from_numpy(drawn)
    scored, entropy = over.evaluate(logits, tensors, chosen, entropy=True)
    assert over.evaluate(logits, tensors, chosen, entropy=False)[1] is None
    np.testing.assert_allclose(scored.numpy(), log_prob, rtol=1e-4, atol=1e-5)
    assert drawn.shape == (50, *action.leaf.shape)
    assert entropy.shape == (50,)


def test_drawn_actions_have_the_probabilities_of_the_logits():
    logits = np.tile(np.log([[0.2, 0.5, 0.3]]), (30_000, 1)).astype(np.float32)
    over = distribution(Discrete(3))
    drawn, _ = over.sample(logits, {}, np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(drawn) / 30_000, [0.2, 0.5, 0.3], atol=0.01)
    first = torch.from_numpy(logits[:1])
    entropy = over.evaluate(first, {}, torch.zeros(1, dtype=torch.long), entropy=True)[1]
    assert entropy.item() == pytest.approx(-sum(p * np.log(p) for p in (0.2, 0.5, 0.3)), abs=1e-5)


def test_running_moments_equal_those_of_all_rows_at_once():
    rng = np.random.default_rng(0)
    batches = [rng.normal(3, 2, (n, 4)) for n in (1, 7, 0, 50)]
    moments = Moments((4,))
    for batch in batches:
        moments.update(batch)
    rows = np.concatenate(batches)
    np.testing.assert_allclose(moments.mean, rows.mean(0))
    np.testing.assert_allclose(moments.variance, rows.var(0))


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32, np.bool_])
def test_observations_of_any_type_are_answered_alike_in_numpy_and_torch(dtype):
    network, observation = Network(hidden=(8,)), leaf((6,), dtype)
    module, params = module_and_params(network, observation)
    answer = networks.inference(network, observation, module, "n")
    answer.load(params)
    x = np.random.default_rng(1).integers(0, 2, (5, 6)).astype(dtype)
    expected = module(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(answer(x), expected, rtol=1e-5, atol=1e-5)


def test_a_vector_of_bytes_is_scaled_alike_in_numpy_and_torch():
    network, observation = Network(hidden=(8,)), leaf((6,), np.uint8)
    module, params = module_and_params(network, observation)
    answer = networks.inference(network, observation, module, "n")
    answer.load(params)
    x = np.random.default_rng(1).integers(0, 255, (5, 6), dtype=np.uint8)
    expected = module(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(answer(x), expected, rtol=1e-5, atol=1e-5)
    scaled = module(torch.from_numpy(x.astype(np.float32) / 255)).detach().numpy()
    np.testing.assert_allclose(expected, scaled, rtol=1e-5, atol=1e-6)
