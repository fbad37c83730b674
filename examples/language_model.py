"""A small language model, trained on a short text by peers that come and go.

The text is text.txt, character by character; the model is a transformer with two layers. Every peer draws its own
passages from the text. As in naive_ddp.py all peers average their gradients in every step, with two differences that
larger models need: AdamW, whose moments are part of the shared state, and one reduce for each parameter, four at a
time.

`share_` moves parameters and gradients into shared memory. So gradients are reduced in place, and a newcomer receives
parameters directly into the model.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import (
    after_sync,
    batch_size,
    digest,
    generator_of,
    named,
    optimizer_tensors,
    parser,
    say,
    shared_state,
    take_part,
)
from torch import nn

import pccl.torch
from pccl import DataType, ReduceDescriptor, ReduceOp, ReduceOpDescriptor, ReduceOperandDescriptor
from pccl.errors import TooFewPeersError

if TYPE_CHECKING:
    from torch import Tensor

TEXT = Path(__file__).with_name("text.txt").read_text()
ALPHABET = sorted(set(TEXT))
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 48, 48, 4, 2, 16


class LanguageModel(nn.Module):
    """A transformer that predicts the next character of a passage."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, passage: Tensor) -> Tensor:
        """Scores of all characters at all positions."""
        length = passage.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.characters(passage) + self.positions(torch.arange(length))
        scores: Tensor = self.scores(self.layers(hidden, mask=mask, is_causal=True))
        return scores

    def loss(self, passages: Tensor) -> Tensor:
        """The cross entropy per character, in nats."""
        scores = self(passages[:, :-1])
        return nn.functional.cross_entropy(scores.flatten(0, 1), passages[:, 1:].flatten())

    def write(self, beginning: str, length: int, seed: int) -> str:
        """Generate some text."""
        generator, text = torch.Generator().manual_seed(seed), beginning
        with torch.no_grad():
            for _ in range(length):
                scores = self(encode(text[-CONTEXT:])[None])[0, -1]
                text += ALPHABET[int(torch.multinomial(scores.softmax(0), 1, generator=generator))]
        return text


def encode(text: str) -> Tensor:
    """Characters as their indices in the alphabet."""
    return torch.tensor([ALPHABET.index(character) for character in text])


def passages(text: Tensor, generator: torch.Generator, count: int) -> Tensor:
    """Random passages of the text."""
    starts = torch.randint(len(text) - CONTEXT, (count,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])


def reduces(model: nn.Module) -> list[ReduceOpDescriptor]:
    """One reduce for each gradient, in place, each with its own tag."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    operand = ReduceOperandDescriptor(DataType.FLOAT)
    return [
        ReduceOpDescriptor.from_torch(
            gradient, gradient, ReduceDescriptor(gradient.numel(), ReduceOp.AVG, tag, operand, None)
        )
        for tag, gradient in enumerate(gradients)
    ]


def main() -> None:
    """Train until the run has made all its steps, then generate text."""
    arguments = parser(__doc__, steps=300).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    model, text = LanguageModel(), encode(TEXT)
    train_text, held_out = text.tensor_split([len(text) * 9 // 10])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    moments = optimizer_tensors(optimizer)  # creates the gradients as well
    pccl.torch.share_(model)
    gradients = reduces(model)
    tensors = {**dict(model.named_parameters()), **named("optimizer", moments)}
    state = shared_state(tensors, arguments.checkpoint)

    def train(comm: Any) -> None:
        while True:
            comm.wait_for_world_size(arguments.min_peers, timeout=arguments.wait)
            received = comm.sync_shared_state(state).rx_bytes
            if received:
                say(f"received {received} bytes, revision {state.revision}")
            after_sync(arguments, comm, state, tensors)
            if state.revision >= arguments.steps:
                return
            optimizer.zero_grad(set_to_none=False)  # keeps the gradients in their shared memory
            generator = generator_of(arguments.seed, state.revision, comm.peer_id)
            loss = model.loss(passages(train_text, generator, batch_size(arguments, BATCH)))
            loss.backward()
            try:
                info = comm.all_reduce_multiple_with_retry(gradients, max_in_flight=4)
                optimizer.step()
                state.push_revision()
                say(f"step {state.revision}  loss {loss.item():.4f}  peers {info.world_size}")
            except TooFewPeersError:
                say("alone")  # repeats the step when another peer has joined
            time.sleep(arguments.pace)
            comm.update_topology()

    take_part(arguments, train)
    with torch.no_grad():
        loss = model.loss(passages(held_out, torch.Generator().manual_seed(0), 64)).item()
    say(f"it writes: {model.write('The ', 200, arguments.seed)!r}")
    say(f"done  loss {loss:.6f}  revision {state.revision}  digest {digest(tensors.values())}")


if __name__ == "__main__":
    main()
