"""The prior: causal logits, the cache, sampling, what is given, and a sequence learned by heart."""

import time
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from softvq.prior import CodePrior, CodePriorConfig, SamplingConfig, sample
from softvq.prior.sampling import probabilities

SMALL = CodePriorConfig(
    codebook_sizes=(5, 7),
    grids=((2, 3), (4, 2)),
    classes=("cat", "dog", "ship"),
    width=16,
    depth=2,
    heads=2,
)
GREEDY = SamplingConfig(temperature=0.0)


def built(config: CodePriorConfig = SMALL, seed: int = 0) -> CodePrior:
    """In eval mode, with weights that are not near zero."""
    torch.manual_seed(seed)
    prior = CodePrior(config)
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return prior.eval()


def codes(count: int, config: CodePriorConfig = SMALL, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(size, (count, *grid), generator=generator)
        for size, grid in zip(config.codebook_sizes, config.grids, strict=True)
    )


@pytest.mark.parametrize("training", [True, False])
def test_sampling_leaves_the_prior_in_its_mode(training):
    prior = CodePrior(SMALL).train(training)
    labels = torch.tensor([0, 1])
    drawn = [sample(prior, 2, GREEDY, labels) for _ in range(2)]
    assert prior.training == training
    assert all(map(torch.equal, *drawn))  # without dropout
    with pytest.raises(ValueError, match="labels"):
        sample(prior, 2, GREEDY, labels + 5)
    assert prior.training == training


def flat_logits(prior, indices, labels=None):
    """One list entry a position, in the order of the sequence."""
    return [logits for level in prior(indices, labels) for logits in level.flatten(1, 2).unbind(1)]


def test_the_sequence_is_raster_order_with_the_coarsest_level_first():
    top = torch.tensor([[[0, 1, 2], [3, 4, 0]]])
    bottom = torch.tensor([[[0, 1], [2, 3], [4, 5], [6, 0]]])
    tokens = built().flatten((top, bottom))
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 10, 11, 5]]
    again = built().unflatten(tokens)
    assert torch.equal(again[0], top)
    assert torch.equal(again[1], bottom)


def test_begin_tokens_lie_outside_the_codes():
    prior = built()
    assert prior.begin(2, None).tolist() == [[15], [15]]
    assert prior.begin(3, torch.tensor([0, 2, -1])).tolist() == [[12], [14], [15]]


@pytest.mark.parametrize("changed", range(14))
def test_logits_depend_on_the_codes_before_alone(changed):
    prior, indices = built(), codes(2)
    tokens = prior.flatten(indices)
    level = 0 if changed < 6 else 1
    low, size = prior.offsets[level], SMALL.codebook_sizes[level]
    other = tokens.clone()
    other[:, changed] = (tokens[:, changed] - low + 1) % size + low
    before, after = flat_logits(prior, indices), flat_logits(prior, prior.unflatten(other))
    for position in range(14):
        same = torch.equal(before[position], after[position])
        assert same == (position <= changed)


def test_the_first_code_depends_on_the_class_and_on_there_being_none():
    prior, indices = built(), codes(1)
    first = [flat_logits(prior, indices, labels)[0] for labels in (None, torch.tensor([0]))]
    first.append(flat_logits(prior, indices, torch.tensor([2]))[0])
    assert (first[0] - first[1]).abs().max() > 1e-3
    assert (first[1] - first[2]).abs().max() > 1e-3


def test_the_cache_gives_the_logits_of_the_whole_sequence():
    prior, indices = built(), codes(3)
    labels = torch.tensor([0, 1, 2])
    whole = flat_logits(prior, indices, labels)
    tokens = torch.cat([prior.begin(3, labels), prior.flatten(indices)], 1)
    cache = prior.start_cache(3)
    with torch.no_grad():
        assert_close(prior.next_logits(tokens[:, :4], cache), whole[3], rtol=1e-5, atol=1e-5)
        for position in range(4, 14):
            one = prior.next_logits(tokens[:, position : position + 1], cache)
            assert_close(one, whole[position], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="takes 1 token, got 2"):
        prior.next_logits(tokens[:, :2], cache)


def test_one_sequence_learned_by_heart_comes_back_greedily_after_its_begin_token(monkeypatch):
    # C15: as many codes as tokens, a begin token beyond them, [begin, 3, 1, 2] against [3, 1, 2, 0]
    torch.manual_seed(0)
    config = CodePriorConfig(
        codebook_sizes=(4,), grids=((2, 2),), width=32, depth=1, heads=2, dropout=0.0
    )
    prior, learned = CodePrior(config), (torch.tensor([[[3, 1], [2, 0]]]),)
    optimizer, loss = torch.optim.Adam(prior.parameters(), lr=1e-2), torch.tensor(9.0)
    read, through = [], CodePrior._through
    monkeypatch.setattr(
        CodePrior, "_through", lambda self, tokens, cache: read.append(tokens.tolist())
        or through(self, tokens, cache),
    )  # fmt: skip
    while loss > 0.01:
        assert len(read) < 500
        loss = prior.negative_log_likelihood(learned).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(tokens == [[4, 3, 1, 2]] for tokens in read)
    (logits,) = prior(learned)
    assert logits.argmax(-1).flatten().tolist() == [3, 1, 2, 0]
    for cached in (True, False):
        assert torch.equal(sample(prior, 1, GREEDY, cached=cached)[0], learned[0])


def test_no_begin_token_is_ever_drawn_however_probable_its_row_makes_it():
    # C15: nothing but codes has logits at all, so that each of them gets its share.
    for config in (
        CodePriorConfig(codebook_sizes=(4,), grids=((1, 1),), width=8, depth=1, heads=1),
        replace(SMALL, codebook_sizes=(4, 3), grids=((1, 1), (1, 1))),
    ):
        prior = built(config)
        assert prior.head.weight.shape == (sum(config.codebook_sizes), config.width)
        with torch.no_grad():
            prior.head.weight.zero_()
            prior.embedding.weight[sum(config.codebook_sizes) :] *= 9.0
        generator = torch.Generator().manual_seed(0)
        drawn = sample(prior, 4000, SamplingConfig(), generator=generator)
        for grid, size in zip(drawn, config.codebook_sizes, strict=True):
            share = grid.flatten().bincount() / 4000
            assert_close(share, torch.full((size,), 1 / size), rtol=0, atol=0.03)


def test_likelihoods_are_those_of_a_loop_over_positions():
    prior, indices = built(), codes(3)
    expected = torch.zeros(3, 2)
    tokens = prior.flatten(indices)
    for position, logits in enumerate(flat_logits(prior, indices)):
        level = 0 if position < 6 else 1
        code = tokens[:, position] - prior.offsets[level]
        expected[:, level] -= logits.log_softmax(1).gather(1, code[:, None])[:, 0]
    assert_close(prior.negative_log_likelihood(indices), expected)


def test_sequences_learned_by_heart_come_back_greedily_by_their_class():
    torch.manual_seed(0)
    config = replace(SMALL, width=32, dropout=0.0)
    prior, learned, labels = CodePrior(config), codes(3, config, seed=4), torch.arange(3)
    optimizer = torch.optim.Adam(prior.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        prior.negative_log_likelihood(learned, labels).sum().backward()
        optimizer.step()
    for cached in (True, False):
        drawn = sample(prior, 3, GREEDY, labels, cached=cached)
        for grid, expected in zip(drawn, learned, strict=True):
            assert torch.equal(grid, expected)


def test_cached_sampling_draws_the_same_codes_and_is_reproducible():
    prior, labels = built(), torch.tensor([1, 2, 0, 1])
    drawn = [
        sample(
            prior, 4, SamplingConfig(), labels,
            generator=torch.Generator().manual_seed(seed), cached=cached,
        )
        for seed, cached in ((0, True), (0, False), (1, True))
    ]  # fmt: skip
    for level, size in enumerate(SMALL.codebook_sizes):
        assert torch.equal(drawn[0][level], drawn[1][level])
        assert 0 <= drawn[0][level].min() <= drawn[0][level].max() < size
    assert any(not torch.equal(a, b) for a, b in zip(drawn[0], drawn[2], strict=True))


def test_codes_that_are_given_stay_and_the_rest_is_drawn_after_them():
    prior, known = built(), codes(6, seed=9)
    given = tuple(grid.clone() for grid in known)
    for grid in given:
        grid[:, grid.shape[1] // 2 :] = -1
    drawn = sample(prior, 6, GREEDY, given=given)
    for grid, old in zip(drawn, known, strict=True):
        half = grid.shape[1] // 2
        assert torch.equal(grid[:, :half], old[:, :half])
    # Each drawn code is the most probable one after those before it.
    tokens = prior.flatten(drawn)
    for position, logits in enumerate(flat_logits(prior, drawn)):
        level = 0 if position < 6 else 1
        if torch.cat([grid.flatten(1) for grid in given], 1)[0, position] < 0:
            assert torch.equal(tokens[:, position] - prior.offsets[level], logits.argmax(1))


def naive_probabilities(logits, config):
    """One row, by sorting in plain Python."""
    weights = [value / config.temperature for value in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda k: -weights[k])
    kept = order[: config.top_k or len(order)]
    scale = sum(torch.tensor([weights[k] for k in kept], dtype=torch.float64).exp())
    p = {k: torch.tensor(weights[k], dtype=torch.float64).exp() / scale for k in kept}
    total, chosen = 0.0, []
    for k in kept:
        if total >= config.top_p:
            break
        chosen.append(k)
        total += float(p[k])
    return [float(p[k]) / total if k in chosen else 0.0 for k in range(len(weights))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 4, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.6, 0.01])
def test_truncation_is_that_of_a_plain_loop(temperature, top_k, top_p):
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = torch.randn(8, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.tensor([naive_probabilities(row, config) for row in logits])
    assert_close(probabilities(logits, config), expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-30, 1e-38, 1e-40, 1e-60, 1e-300])
def test_a_temperature_of_almost_zero_is_the_most_probable_code(temperature, dtype):
    config = SamplingConfig(temperature=temperature)
    logits = torch.tensor([[1.0, 3.0, 2.0], [1e4, -1e4, -torch.inf]], dtype=dtype)
    assert probabilities(logits, config).tolist() == [[0, 1, 0], [1, 0, 0]]
    if temperature:
        tied = probabilities(torch.tensor([[3.0, 1.0, 3.0]], dtype=dtype), config)
        assert tied.tolist() == [[0.5, 0, 0.5]]
    p = probabilities(logits[:, :2], SamplingConfig(temperature=1e300))
    assert_close(p, torch.full_like(p, 0.5))


def test_samples_have_the_probabilities_of_the_model():
    prior = built(CodePriorConfig(codebook_sizes=(4,), grids=((1, 1),), width=8, depth=1, heads=1))
    expected = prior((torch.zeros(1, 1, 1, dtype=torch.int64),))[0][0, 0, 0].softmax(0)
    drawn = sample(prior, 20_000, SamplingConfig(), generator=torch.Generator().manual_seed(0))
    share = drawn[0].flatten().bincount(minlength=4) / 20_000
    assert_close(share, expected.detach(), rtol=0, atol=0.02)


@pytest.mark.slow
def test_the_cache_makes_sampling_five_times_as_fast():
    config = CodePriorConfig(codebook_sizes=(512,), grids=((8, 8),), depth=1)
    prior, seconds = built(config), {}
    for cached in (True, False, True, False):
        started = time.perf_counter()
        sample(prior, 64, SamplingConfig(), cached=cached)
        took = time.perf_counter() - started
        seconds[cached] = min(took, seconds.get(cached, took))
    assert seconds[False] > 5 * seconds[True]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (dict(temperature=-1.0), "temperature must be 0 or more, got -1.0"),
        (dict(temperature=float("nan")), "temperature must be 0 or more, got nan"),
        (dict(top_k=-1), "top_k must be 0 or more, got -1"),
        (dict(top_p=0.0), r"top_p must lie in \(0, 1\], got 0.0"),
        (dict(top_p=1.1), r"top_p must lie in \(0, 1\], got 1.1"),
    ],
)
def test_what_cannot_be_sampled_is_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        SamplingConfig(**options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (dict(codebook_sizes=()), "codebook_sizes must each be at least 1"),
        (dict(grids=((8, 8), (4, 4))), "grids must be one for each of 1 levels"),
        (dict(grids=((8, 0),)), "grids must be pairs of at least 1"),
        (dict(classes=("cat", "cat")), "classes must differ, got"),
        (dict(depth=0), "depth must be at least 1, got 0"),
        (dict(width=10, heads=4), "heads must divide width 10, got 4"),
        (dict(dropout=1.0), r"dropout must lie in \[0, 1\), got 1.0"),
    ],
)
def test_a_prior_that_cannot_be_is_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        CodePriorConfig(**options)


def test_codes_and_labels_of_another_tokenizer_are_refused():
    prior = built()
    top, bottom = codes(2)
    for indices, complaint in (
        ((top, bottom[:, :3]), r"grids \(\(2, 3\), \(4, 2\)\), got \(\(2, 3\), \(3, 2\)\)"),
        ((top + 5, bottom), r"codes must lie in \[0, 5\)"),
        ((top - 5, bottom), r"codes must lie in \[0, 5\)"),
    ):
        with pytest.raises(ValueError, match=complaint):
            prior(indices)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), the prior's classes, or"):
        prior((top, bottom), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="labels must be one for each of 2 images, got 1"):
        prior.begin(2, torch.tensor([0]))
    with pytest.raises(ValueError, match="given must hold 3 grids"):
        sample(prior, 3, GREEDY, given=(top, bottom))
