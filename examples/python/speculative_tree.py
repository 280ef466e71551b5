"""Speculative decoding over a tree: draft several continuations, verify all of them in one step, keep the longest.

A toy model of random weights: tokens are embedded, one attention layer mixes them, and a matrix scores what comes
next. The draft guesses three tokens a step, and now and then none of them right. What is generated is what plain greedy
decoding generates, in fewer steps.
"""

import numpy as np

import raddle

HEADS, DIM, PAGE, VOCABULARY = 4, 32, 16, 50
rng = np.random.default_rng(7)
embedding, values, scores = (rng.standard_normal((VOCABULARY, HEADS, DIM)).astype(np.float32) for _ in range(3))
# A node's position is its depth in the text, whatever its place in the list of nodes: RoPE and the window go by that.
variant = [raddle.Rope(DIM), raddle.SlidingWindow(63), raddle.Causal()]
attn = raddle.Attention(raddle.AttentionSpec(HEADS, HEADS, DIM, dtype="float32", variant=variant))


class Cache:
    """Pages of one request."""

    def __init__(self) -> None:
        self.pools = tuple(np.zeros((32, PAGE, HEADS, DIM), np.float32) for _ in range(2))
        self.table = rng.permutation(32).astype(np.int32)[None]
        self.kv_len = 0

    def step(self, tokens, parents=None):
        """Appends tokens, attends, and returns the next token after each: as a text, or as a tree of drafts."""
        rows = len(tokens)
        place = [0, rows], None, self.table, [self.kv_len + rows], PAGE
        if parents is None:
            pages = layout = raddle.PagedKV(*place)
        else:
            layout = raddle.TokenTree(*place, parents=parents)
            pages = layout.pages
        x = embedding[tokens]
        raddle.append_kv(pages, self.pools, x, values[tokens])
        out = attn.run(attn.plan(layout), x, self.pools) + 0.3 * x
        if parents is None:
            self.kv_len += rows
        return np.tensordot(out, scores, axes=((1, 2), (1, 2))).argmax(1), layout


def greedy(prompt, count):
    cache, text = Cache(), list(prompt)
    last = cache.step(prompt)[0][-1]
    while len(text) < len(prompt) + count:
        text.append(int(last))
        last = cache.step(text[-1:])[0][-1]
    return text


def speculative(prompt, count, oracle, depth=4):
    """A node's children are guesses of what follows it; the first guess is right three times out of four."""
    cache, text, steps = Cache(), list(prompt), 0
    cache.step(prompt[:-1])
    while len(text) < len(prompt) + count:
        # The root is the last token of the text, which is certain; below it a spine of guesses and their siblings.
        tokens, parents, spine = [text[-1]], [-1], 0
        for place in range(len(text), len(text) + depth):
            right = oracle[place] if place < len(oracle) else 0
            guesses = [right if rng.random() < 0.75 else rng.integers(VOCABULARY), *rng.integers(VOCABULARY, size=2)]
            tokens += [int(guess) for guess in guesses]
            parents += [spine] * 3
            spine = len(tokens) - 3
        following, tree = cache.step(tokens, parents)
        steps += 1
        # Go down as long as some child is what the model says next.
        node, accepted = 0, []
        while True:
            child = [n for n, parent in enumerate(parents) if parent == node and tokens[n] == following[node]]
            if not child:
                break
            node = child[0]
            accepted.append(tokens[node])
        cache.kv_len = int(tree.accept(cache.pools, [node])[0])
        text += [*accepted, int(following[node])]
    return text[: len(prompt) + count], steps


prompt = rng.integers(VOCABULARY, size=100).tolist()
plain = greedy(prompt, 60)
drafted, steps = speculative(prompt, 60, plain)
assert drafted == plain, "verification must not change what is generated"
print(f"60 tokens in {steps} steps of 13 drafts, the same as in 60 steps of one")
print("text:", drafted[len(prompt) :][:20], "…")
