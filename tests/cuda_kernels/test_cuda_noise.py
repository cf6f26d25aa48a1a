"""The kernels' noise against Philox written down again, itself checked by the known answers of Random123."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from cuda_host import EMULATE, Library, build, fields, needs_compiler

SOURCE = """
#include "device.cuh"
#include "philox.cuh"
struct NoiseArgs {
  double *uniforms, *gumbels;
  unsigned long long *bits, seed;
  unsigned sample, anchor;
};
KERNEL(noise, NoiseArgs, 32) {
  const sampling::Noise noise = {args.seed, args.sample, args.anchor};
  const unsigned i = threadIdx.x;
  args.uniforms[3 * i] = noise.uniform(i, sampling::DRAFT);
  args.uniforms[3 * i + 1] = noise.uniform(i, sampling::ACCEPT);
  args.uniforms[3 * i + 2] = noise.resample(i);
  args.bits[i] = noise.gumbel_bits(3, i >> 1).of(i);
  args.gumbels[i] = sampling::standard_gumbel(args.bits[i]);
}
"""
Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 (Salmon et al., SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def test_the_reference_gives_the_known_answers() -> None:
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Library:
    needs_compiler()
    source: Path = tmp_path_factory.mktemp("noise") / "noise.cu"
    source.write_text(SOURCE)
    return Library(build([source, EMULATE / "run.cpp", EMULATE / "fibers.cpp"], shared=True, name="noise"))


@pytest.mark.parametrize(
    "seed, sample, anchor", [(0, 0, 0), (0x123456789ABCDEF0, 2, 41), (2**64 - 1, 7, 2**32 - 3)]
)
def test_every_number_is_that_of_its_counter(numbers: Library, seed: int, sample: int, anchor: int) -> None:
    from ctypes import c_uint32, c_uint64, c_void_p

    uniforms, gumbels = torch.zeros(96, dtype=torch.float64), torch.zeros(32, dtype=torch.float64)
    bits = torch.zeros(32, dtype=torch.int64)
    layout = fields(
        uniforms=c_void_p, gumbels=c_void_p, bits=c_void_p, seed=c_uint64, sample=c_uint32, anchor=c_uint32
    )
    args = layout(uniforms.data_ptr(), gumbels.data_ptr(), bits.data_ptr(), seed, sample, anchor)
    numbers.launch("noise", (1, 1, 1), 32, args, [uniforms, gumbels, bits])
    key = (seed & 0xFFFFFFFF, seed >> 32)
    for i in range(32):
        for purpose in range(3):  # draft, accept, resample: by the anchor's position and the slot
            words = philox((anchor, i, purpose, sample), key)
            expected = ((words[0] << 32 | words[1]) >> 11) / 2**53
            assert uniforms[3 * i + purpose].item() == expected
        # Gumbel: by the token's own position and its id, two ids a block.
        words = philox(((anchor + 1 + 3) & 0xFFFFFFFF, i >> 1, 3, sample), key)
        pair = words[0] << 32 | words[1] if i % 2 == 0 else words[2] << 32 | words[3]
        assert bits[i].item() & (2**64 - 1) == pair
        u = ((pair >> 12) + 0.5) / 2**52
        assert gumbels[i].item() == pytest.approx(-math.log(-math.log(u)), rel=1e-14, abs=1e-15)
