"""The shapes in the signatures of common.py are checked at every call of the tests."""

import jaxtyping
import pytest
import torch

import common


def test_an_axis_that_does_not_fit_is_refused():
    z, W_O = torch.zeros(2, 1, 3, 4), torch.zeros(2, 4, 5)
    assert common.write(z, W_O).shape == (1, 3, 5)
    for wrong in (W_O[:1], W_O[0], W_O.mT):
        with pytest.raises(jaxtyping.TypeCheckError):
            common.write(z, wrong)
