"""`SamplingParams` checks every value, keeps it in a form that can be compared, and says why it refuses the rest."""

import dataclasses
import math

import pytest

from eagle_jax import SamplingParams
from eagle_jax.sampling import SamplingMode


def test_defaults_are_greedy():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.stop_strings, params.stop_token_ids) == (0.0, 16, (), ())


def test_values_without_effect_at_temperature_zero_are_accepted():
    SamplingParams(temperature=0, seed=7, top_k=50, top_p=0.9, min_p=0.1, n=1, repetition_penalty=1, logit_bias={})


def test_stops_are_kept_as_tuples_and_params_can_be_compared():
    params = SamplingParams(stop="a", stop_token_ids=[1, 2])
    assert (params.stop_strings, params.stop_token_ids) == (("a",), (1, 2))
    assert params == SamplingParams(stop=["a"], stop_token_ids=(1, 2))
    assert hash(params) == hash(SamplingParams(stop=["a"], stop_token_ids=(1, 2)))
    assert hash(SamplingParams(logit_bias={}, bad_words=[])) == hash(SamplingParams())
    assert dataclasses.replace(params, max_tokens=3).stop_strings == ("a",)


def test_biases_and_allowed_ids_are_kept_in_a_form_that_can_be_compared():
    params = SamplingParams(logit_bias={7: 1, 2: -0.5}, allowed_token_ids=[5, 2])
    assert (params.biases, params.allowed_token_ids) == (((2, -0.5), (7, 1.0)), (5, 2))
    assert hash(params) == hash(dataclasses.replace(params))
    assert dataclasses.replace(params, seed=-(2**63)).biases == params.biases
    assert SamplingParams().biases == ()


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, SamplingMode.GREEDY),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 1}, SamplingMode.GREEDY),
        ({"temperature": 9e-6}, SamplingMode.GREEDY),
        ({"temperature": 1e-5}, SamplingMode.SAMPLING),
        ({"repetition_penalty": 1.1}, SamplingMode.FULL),
        ({"presence_penalty": -0.1}, SamplingMode.FULL),
        ({"frequency_penalty": 0.1}, SamplingMode.FULL),
        ({"min_tokens": 1}, SamplingMode.FULL),
        ({"logit_bias": {0: 1.0}}, SamplingMode.FULL),
        ({"allowed_token_ids": [0]}, SamplingMode.FULL),
        ({"logprobs": 0}, SamplingMode.FULL),
        ({"temperature": 1.0, "logprobs": 3}, SamplingMode.FULL),
    ],
)
def test_the_least_class_of_rounds_that_covers_a_request(options, mode):
    assert SamplingParams(**options).mode is mode


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -1}, ValueError, "temperature must be a finite number of at least 0, got -1"),
        ({"temperature": float("nan")}, ValueError, "temperature must be a finite number of at least 0, got nan"),
        ({"temperature": float("inf")}, ValueError, "temperature must be a finite number"),
        ({"temperature": "0"}, TypeError, "temperature must be a number, got '0'"),
        ({"top_p": 0}, ValueError, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.1}, ValueError, "top_p must be in"),
        ({"top_p": float("nan")}, ValueError, "top_p must be in"),
        ({"min_p": -0.1}, ValueError, r"min_p must be in \[0, 1\], got -0.1"),
        ({"top_k": -2}, ValueError, "top_k must be 0 or -1 .* got -2"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer, got 1.5"),
        ({"seed": "x"}, TypeError, "seed must be an integer, got 'x'"),
        ({"seed": 2**63}, ValueError, r"seed must be in -2\^63 .. 2\^63 - 1, got 9223372036854775808"),
        ({"max_tokens": -1}, ValueError, "max_tokens must be at least 0, got -1"),
        ({"max_tokens": 1.0}, TypeError, "max_tokens must be an integer, got 1.0"),
        ({"stop": ["a", ""]}, ValueError, "stop has an empty string"),
        ({"stop": [3]}, TypeError, "stop must be a string or strings, got 3"),
        ({"stop": "a", "detokenize": False}, ValueError, "needs the text, so detokenize must be True"),
        ({"stop_token_ids": [-1]}, ValueError, "stop_token_ids must be ids of at least 0, got -1"),
        ({"stop_token_ids": ["a"]}, TypeError, "stop_token_ids must be an integer, got 'a'"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos must be True or False, got 1"),
        ({"n": 2}, ValueError, "n must be 1, got 2"),
        ({"presence_penalty": 2.1}, ValueError, r"presence_penalty must be in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": math.nan}, ValueError, r"frequency_penalty must be in \[-2, 2\], got nan"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be a finite number above 0, got 0"),
        ({"repetition_penalty": math.inf}, ValueError, "repetition_penalty must be a finite number above 0, got inf"),
        ({"min_tokens": -1}, ValueError, "min_tokens must be at least 0, got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, ValueError, "min_tokens 5 exceeds max_tokens 4"),
        ({"logprobs": 21}, ValueError, "logprobs must be None or 0 to 20, got 21"),
        ({"logprobs": -1}, ValueError, "logprobs must be None or 0 to 20, got -1"),
        ({"prompt_logprobs": 1}, ValueError, "prompt_logprobs must be None"),
        ({"logit_bias": {3: math.inf}}, ValueError, "logit_bias must be finite, got inf for 3"),
        ({"logit_bias": {"3": 1.0}}, TypeError, "logit_bias must be an integer, got '3'"),
        ({"logit_bias": {3: "x"}}, TypeError, "logit_bias must hold numbers, got 'x'"),
        ({"logit_bias": {-3: 1.0}}, ValueError, "logit_bias must be ids of at least 0, got -3"),
        ({"bad_words": ["a"]}, ValueError, "bad_words must be None"),
        ({"allowed_token_ids": []}, ValueError, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [-1]}, ValueError, "allowed_token_ids must be ids of at least 0, got -1"),
        ({"best_of": 2}, ValueError, "best_of must be None, got 2"),
        ({"max_token": 3}, TypeError, "max_token"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**options)
