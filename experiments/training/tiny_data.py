"""Text, tokenizer and noise for the small block-diffusion model.

Letters: W windows, S clean positions of a window, B block length, N blocks of a batch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END, MASK = "<|endoftext|>", "<|mask|>"
PROMPT = "Question: {question}\nAnswer:"


def load_documents(path: Path) -> list[str]:
    """GSM8K problems as `Question: …` newline `Answer: …`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [PROMPT.format(question=row["question"]) + " " + row["answer"] for row in rows]


def train_tokenizer(documents: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that keeps every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True, slots=True)
class Corpus:
    """All documents as one stream, each closed by the end token.

    stream: int64[tokens]; starts: int64[documents + 1], the last one is the end of the stream.
    """

    stream: np.ndarray
    starts: np.ndarray

    @classmethod
    def encode(
        cls, documents: list[str], tokenizer: PreTrainedTokenizerFast, longest: int | None = None
    ) -> Corpus:
        """Tokenize the documents in their order; those above `longest` tokens start every so many
        tokens anew, so that a long document is as many windows as it has text for."""
        encoded = tokenizer(documents, add_special_tokens=False)["input_ids"]
        pieces = [np.array([*ids, tokenizer.eos_token_id]) for ids in encoded]
        starts, end = [0], 0
        for piece in pieces:
            starts += range(end + (longest or len(piece)), end + len(piece), longest or len(piece))
            end += len(piece)
            starts.append(end)
        return cls(np.concatenate(pieces), np.array(starts))

    def windows(self, items: np.ndarray, length: int, seed: int, shuffle: bool = True) -> Tensor:
        """Windows [W, length] number `items` of an endless, stateless series.

        The series runs through the documents in a new order each epoch. Half of the windows begin
        with their document, as decoding does; the others at a random place in it.
        """
        documents = len(self.starts) - 1
        rows = []
        for item in items.tolist():
            epoch, place = divmod(item, documents)
            rng = np.random.default_rng((seed, item))
            document = place
            if shuffle:
                document = np.random.default_rng((seed, epoch)).permutation(documents)[place]
            begin, end = self.starts[document : document + 2]
            if shuffle and rng.random() < 0.5:
                begin = rng.integers(begin, end)
            rows.append(self.stream[np.arange(begin, begin + length) % len(self.stream)])
        return torch.from_numpy(np.stack(rows))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Corpora that take turns: window number i is of corpus `i modulo their number`."""

    turns: tuple[Corpus, ...]

    def windows(self, items: np.ndarray, length: int, seed: int) -> Tensor:
        """Windows [W, length] of an endless, stateless series; a corpus may have several turns."""
        rows = []
        for item in items.tolist():
            rounds, turn = divmod(item, len(self.turns))
            corpus = self.turns[turn]
            own = [place for place, other in enumerate(self.turns) if other is corpus]
            number = rounds * len(own) + own.index(turn)
            rows.append(corpus.windows(np.array([number]), length, seed))
        return torch.cat(rows)


def stratified_noise(windows: int, length: int, block: int, rng: np.random.Generator) -> Tensor:
    """Which positions [W, length] are masked: m of each block, m uniform over 1..B and spread
    evenly over the N blocks of the batch (every N-quantile of the range occurs once)."""
    blocks = windows * length // block
    quantiles = (rng.permutation(blocks) + rng.random(blocks)) / blocks
    masked = 1 + np.floor(quantiles * block).astype(np.int64)
    ranks = rng.random((blocks, block)).argsort(1).argsort(1)
    return torch.from_numpy((ranks < masked[:, None]).reshape(windows, length))


def doubled_mask(length: int, block: int) -> Tensor:
    """Who sees whom in [noisy | clean], boolean [1, 1, 2·length, 2·length].

    A noisy block sees itself and the clean blocks before it, which is what a denoising forward
    finds in its cache; a clean block sees itself and the clean blocks before it.
    """
    index = torch.arange(length) // block
    same, earlier = index[:, None] == index[None], index[:, None] > index[None]
    noisy = torch.cat((same, earlier), dim=1)
    clean = torch.cat((torch.zeros_like(same), same | earlier), dim=1)
    return torch.cat((noisy, clean))[None, None]


def copies(clean: Tensor, noise: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and positions, both [W, (C + 1)·S], of [noisy copies … | clean].

    clean: [W, S]; noise: [W, C, S], what is masked in each noisy copy.
    """
    rows = clean[:, None].expand(-1, noise.shape[1] + 1, -1).clone()
    rows[:, :-1][noise] = mask_id
    positions = torch.arange(clean.shape[1]).repeat(rows.shape[1])[None].expand(len(clean), -1)
    return rows.flatten(1), positions
