"""llama.cpp's own libraries generate text with a model of random weights.

llama.py make MODEL            writes a small model of the architecture "llama" (GGUF 3), always the same
llama.py run FOLDER MODEL N    loads it with the libraries of FOLDER, all layers on the GPU; prints "ready PID", "at N" now and then
                               and, after N tokens that are each the likeliest one, "result HASH" of all tokens and their logits

It knows no more of llama.h than names: the structs of parameters are taken as they come, but for two fields at their beginning. A struct
that is passed by value may be larger than the library's, as it is the last argument.
"""
import ctypes
import glob
import hashlib
import os
import struct
import sys

LAYERS, WIDTH, HEADS, FEED, VOCABULARY, CONTEXT = 16, 1536, 24, 4096, 4096, 8192


def make(path):
    import numpy as np

    random = np.random.default_rng(1)
    tensors = [("token_embd.weight", (VOCABULARY, WIDTH)), ("output.weight", (VOCABULARY, WIDTH)), ("output_norm.weight", (WIDTH,))]
    for i in range(LAYERS):
        for name, shape in (("attn_norm", (WIDTH,)), ("ffn_norm", (WIDTH,)), ("attn_q", (WIDTH, WIDTH)), ("attn_k", (WIDTH, WIDTH)), ("attn_v", (WIDTH, WIDTH)),
                            ("attn_output", (WIDTH, WIDTH)), ("ffn_gate", (FEED, WIDTH)), ("ffn_up", (FEED, WIDTH)), ("ffn_down", (WIDTH, FEED))):
            tensors.append((f"blk.{i}.{name}.weight", shape))
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()
    number = lambda key, v: text(key) + struct.pack("<II", 4, v)
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama"), text("tokenizer.ggml.model") + struct.pack("<I", 8) + text("no_vocab"),
            text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)]
    keys += [number("llama." + k, v) for k, v in (("context_length", CONTEXT), ("embedding_length", WIDTH), ("block_count", LAYERS), ("feed_forward_length", FEED),
             ("attention.head_count", HEADS), ("attention.head_count_kv", HEADS), ("rope.dimension_count", WIDTH // HEADS), ("vocab_size", VOCABULARY))]
    size = lambda shape: int(np.prod(shape)) * (4 if len(shape) == 1 else 2)  # float32 for vectors, float16 for matrices
    head, at = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys), 0
    for name, shape in tensors:
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", n) for n in reversed(shape)) + struct.pack("<IQ", 0 if len(shape) == 1 else 1, at)
        at += -(-size(shape) // 32) * 32
    with open(path, "wb") as f:
        f.write(head + bytes(-len(head) % 32))
        for name, shape in tensors:
            if len(shape) == 1:
                data = np.ones(shape, dtype=np.float32)
            else:
                data = (random.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)).astype(np.float16)
            f.write(data.tobytes() + bytes(-size(shape) % 32))


class Large(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 1024)]


def run(folder, model, n):
    only = lambda pattern: ctypes.CDLL(sorted(glob.glob(os.path.join(folder, pattern)))[0], mode=ctypes.RTLD_GLOBAL)
    only("libggml-base.so*")
    ggml, llama = only("libggml.*so*"), only("libllama.*so*")
    ggml.ggml_backend_load_all_from_path(folder.encode())
    llama.llama_backend_init()
    p = ctypes.c_void_p
    for f, result, args in (("llama_model_default_params", Large, []), ("llama_model_load_from_file", p, [ctypes.c_char_p, Large]),
                            ("llama_context_default_params", Large, []), ("llama_init_from_model", p, [p, Large]),
                            ("llama_batch_get_one", Large, [p, ctypes.c_int32]), ("llama_decode", ctypes.c_int32, [p, Large]),
                            ("llama_get_logits_ith", p, [p, ctypes.c_int32])):
        getattr(llama, f).restype, getattr(llama, f).argtypes = result, args
    mp = llama.llama_model_default_params()
    struct.pack_into("<i", mp, 16, 99)  # n_gpu_layers, behind two pointers
    m = llama.llama_model_load_from_file(model.encode(), mp)
    cp = llama.llama_context_default_params()
    struct.pack_into("<I", cp, 0, CONTEXT)  # n_ctx
    c = llama.llama_init_from_model(m, cp) if m else None
    if not c:
        sys.exit("the model can't be loaded")
    import numpy as np

    tokens, sums = (ctypes.c_int32 * 8)(1, 5, 25, 125, 625, 3125, 17, 4), hashlib.sha256()
    count = 8
    print("ready", os.getpid(), flush=True)
    for i in range(n):
        if llama.llama_decode(c, llama.llama_batch_get_one(tokens, count)) != 0:
            sys.exit(f"token {i}: llama_decode fails")
        logits = np.ctypeslib.as_array(ctypes.cast(llama.llama_get_logits_ith(c, -1), ctypes.POINTER(ctypes.c_float)), (VOCABULARY,))
        tokens[0], count = int(logits.argmax()), 1
        sums.update(struct.pack("<i", tokens[0]) + logits.tobytes())
        if i % 100 == 0:
            print("at", i, tokens[0], flush=True)
    print("result", sums.hexdigest(), flush=True)


if sys.argv[1] == "make":
    make(sys.argv[2])
else:
    run(sys.argv[2], sys.argv[3], int(sys.argv[4]))
