"""A tiny transformer that generates text as a serving engine does: pages, batches, a radix cache, sampling.

    python examples/python/generate.py

Its weights are random, so the text means nothing. What it shows is that greedy decoding says the same without any KV
cache, with one request at a time, with all of them in a batch, and with prompts that find their beginning in the cache.
What prompts have in common there is read once for all of them.
"""

import numpy as np
import raddle

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 4, 2, 16, 128
WIDTH = HEADS * HEAD_DIM
PAGE_SIZE, NUM_PAGES, NEW_TOKENS = 16, 128, 20

rng = np.random.default_rng(0)


def matrix(rows, columns):
    return (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)


embedding, scores = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32), matrix(WIDTH, VOCABULARY)
layers = [
    dict(
        qkv=matrix(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        out=4 * matrix(WIDTH, WIDTH),  # what others say counts
        up=matrix(WIDTH, 4 * WIDTH),
        down=matrix(4 * WIDTH, WIDTH),
    )
    for _ in range(LAYERS)
]
# RoPE is fused into attention: the cache holds keys that are not turned.
variant = [raddle.Rope(HEAD_DIM), raddle.Causal()]
attention = raddle.Attention(raddle.AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, dtype="float32", variant=variant))


def normalized(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def forward(tokens, attend):
    """Logits of each token's successor, [tokens, VOCABULARY]. attend(layer, q, k, v) knows whose tokens they are."""
    x = embedding[tokens]
    for number, layer in enumerate(layers):
        qkv = (normalized(x) @ layer["qkv"]).reshape(len(x), -1, HEAD_DIM)
        mixed = attend(number, *np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1))
        x = x + mixed.reshape(len(x), WIDTH) @ layer["out"]
        x = x + np.maximum(normalized(x) @ layer["up"], 0) @ layer["down"]
    return normalized(x) @ scores


def sample(logits, temperature, draw):
    """A token of each row, from softmax(logits / temperature) by the Gumbel trick; temperature 0 is greedy."""
    noise = draw.gumbel(size=logits.shape)
    return np.argmax(logits + temperature * noise, axis=-1)


def without_cache(prompt):
    """Greedy decoding that computes the whole text anew for every token."""
    text = list(prompt)
    for _ in range(NEW_TOKENS):
        plan = attention.plan(raddle.RaggedKV([0, len(text)], [0, len(text)]))
        logits = forward(text, lambda _, q, k, v: attention.run(plan, q, (k, v)))
        text.append(int(np.argmax(logits[-1])))
    return text[len(prompt) :]


class Engine:
    """Pages for all layers, a cache of prompts, and steps of many requests at once."""

    def __init__(self):
        self.pool = raddle.PagePool(NUM_PAGES, PAGE_SIZE)
        self.cache = raddle.RadixCache(self.pool)
        self.kv = [self.pool.make_kv(KV_HEADS, HEAD_DIM, "float32") for _ in layers]
        self.computed = 0

    def step(self, requests, prefixes, new_tokens):
        """Appends each request's new tokens, and returns the logits of what follows its last one.

        prefixes: what the cache holds of each, locked. Where that pays, it is read once for all requests that share it.
        """
        counts = [len(tokens) for tokens in new_tokens]
        grown = self.pool.append(requests, counts)
        if grown.missing:
            self.cache.evict(grown.missing)
            grown = self.pool.append(requests, counts)
        layout = self.pool.layout(requests, counts)
        ends = np.cumsum(counts)
        self.shared = raddle.Cascade.from_radix(attention, self.cache, requests, prefixes, [0, *ends.tolist()])
        plan = attention.plan(self.shared)
        for kv in self.kv:
            raddle.copy_pages(kv, grown.from_pages, grown.to_pages)

        def attend(layer, q, k, v):
            raddle.append_kv(layout, self.kv[layer], k, v)
            return attention.run(plan, q, self.kv[layer])

        self.computed += sum(counts)
        return forward(np.concatenate(new_tokens), attend)[ends - 1]

    def generate(self, prompts, temperature=0.0, seed=0):
        draw = np.random.default_rng(seed)
        # A token of each prompt is always computed: its logits are what generation begins with.
        found = [self.cache.match(prompt[:-1], lock=True) for prompt in prompts]
        requests = [self.pool.add(match.pages) for match in found]
        logits = self.step(requests, found, [prompt[match.num_tokens :] for prompt, match in zip(prompts, found)])
        prefixes = [
            self.cache.insert(prompt, self.pool.pages(request), lock=True) for prompt, request in zip(prompts, requests)
        ]
        for match in found:
            self.cache.unlock(match.node)
        texts = [[] for _ in prompts]
        while True:
            tokens = sample(logits, temperature, draw)
            for text, token in zip(texts, tokens):
                text.append(int(token))
            if len(texts[0]) == NEW_TOKENS:
                break
            logits = self.step(requests, prefixes, tokens[:, None])
        self.pool.finish(requests)
        for prefix in prefixes:
            self.cache.unlock(prefix.node)
        return texts


system_prompt = rng.integers(VOCABULARY, size=300).tolist()
prompts = [system_prompt + rng.integers(VOCABULARY, size=n).tolist() for n in (5, 18, 1, 40)]

expected = [without_cache(prompt) for prompt in prompts]
one_by_one = [Engine().generate([prompt])[0] for prompt in prompts]
batched = Engine()
together = batched.generate(prompts)
first = batched.computed
again = batched.generate(prompts)  # every prompt's whole pages are in the cache now
second = batched.computed - first
assert one_by_one == expected and together == expected and again == expected
sampled = batched.generate(prompts, temperature=0.7)
assert batched.generate(prompts, temperature=1e-6) == expected, "a temperature near 0 is greedy"
assert sampled != expected

print(f"{len(prompts)} prompts, {NEW_TOKENS} tokens each: the same without a cache, alone, in a batch, from the cache")
print(f"tokens computed: {first} the first time, {second} the second, of which {4 * NEW_TOKENS - 4} were new")
print("the last step:", batched.shared.explain())
print("greedy: ", expected[0])
print("sampled:", sampled[0])
