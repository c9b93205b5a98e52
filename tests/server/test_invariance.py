"""The vector of a text has the same bits alone, in a batch, and while the server is under load."""

import random
from concurrent.futures import ThreadPoolExecutor

import load
import pytest
from conftest import MINILM, assert_same_bits, encodle_embed

THREADS = 32
# Texts of 3 to 250 tokens. A batch, of 512 tokens by default, holds many of the short texts, but
# only two of the longest.
TEXTS = [text for high in (4, 16, 64, 250) for text in load.texts(40, 3, high, seed=high)]


@pytest.fixture(scope="module")
def alone():
    return encodle_embed(TEXTS)


def embed(server, texts):
    response = server.json("/v1/embeddings", {"model": MINILM, "input": texts})
    return [data["embedding"] for data in response["data"]]


def test_a_text_alone_has_the_vector_of_the_command(server, alone):
    for i in range(0, len(TEXTS), 4):
        assert_same_bits(embed(server, [TEXTS[i]]), alone[i : i + 1], f"text {i}")


def test_a_text_in_a_batch_has_the_same_vector(server, alone):
    assert_same_bits(embed(server, TEXTS), alone)
    order = random.Random(1).sample(range(len(TEXTS)), len(TEXTS))
    assert_same_bits(embed(server, [TEXTS[i] for i in order]), alone[order])


def check_under_load(server, vectors, rounds):
    """THREADS clients send batches of random texts at the same time; every response is compared."""

    def client(seed):
        generator = random.Random(seed)
        for _ in range(rounds):
            chosen = generator.choices(range(len(TEXTS)), k=generator.choice([1, 1, 1, 2, 5]))
            found = embed(server, [TEXTS[i] for i in chosen])
            assert_same_bits(found, vectors[chosen], f"texts {chosen} under load")
        return rounds

    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(client, range(THREADS))) == THREADS * rounds


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_vectors_in_int8_and_bf16_are_the_same_under_load(serve, dtype):
    vectors = encodle_embed(TEXTS, "--dtype", dtype)
    check_under_load(serve("--dtype", dtype), vectors, rounds=4)


@pytest.mark.slow
def test_vectors_do_not_depend_on_batch_delay_and_batch_size(serve, alone):
    check_under_load(serve("--batch-delay", "5", "--max-batch-tokens", "4096"), alone, rounds=3)
    check_under_load(serve("--max-batch-tokens", "1"), alone, rounds=2)
