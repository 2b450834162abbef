// C ABI between the engine (Rust) and OpenVINO's C++-only parts: the SDPAToPagedAttention pass
// and a request whose KV cache tensors belong to the caller.
//
// Every function returns 0, or 1 after an exception whose text sb_last_error() gives; the text
// belongs to the calling thread and lives until its next call. Handles are opaque; nothing is
// assumed about OpenVINO's private layouts. No function may be called on one handle from two
// threads at the same time.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(_WIN32)
#define SB_API extern "C" __declspec(dllexport)
#else
#define SB_API extern "C" __attribute__((visibility("default")))
#endif

struct sb_model;

// One key and value of OpenVINO configuration.
struct sb_property {
    const char* key;
    const char* value;
};

// Layout of one layer's cache: bytes of one block and the element type's name.
struct sb_cache {
    size_t key_block_bytes;
    size_t value_block_bytes;
    char key_type[16];
    char value_type[16];
    // Tokens that a block holds.
    size_t block_tokens;
    // 1 if a key block has the shape of a value block: each token's key is quantised on its own,
    // so that rewinding by length leaves no trace.
    int32_t by_token;
};

// A micro-batch. Sequences are ragged: sequence s has the new rows
// sequence_begins[s]..sequence_begins[s + 1] after past_lens[s] cached positions, in the blocks
// block_indices[block_begins[s]..block_begins[s + 1]].
struct sb_batch {
    size_t n_rows;
    size_t n_sequences;
    size_t n_block_indices;
    // First stage: token ids i64[n_rows]; later stages: null.
    const int64_t* token_ids;
    // Later stages: hidden states f32[n_rows, hidden_dim]; first stage: null.
    const float* hidden;
    size_t hidden_dim;
    const int64_t* positions;
    const int32_t* past_lens;
    const int32_t* sequence_begins;
    const int32_t* block_indices;
    const int32_t* block_begins;
    int32_t max_context_len;
    // Last stage: rows whose logits are wanted; other stages: null.
    const int64_t* logit_rows;
    size_t n_logit_rows;
};

// Text of the last failure on this thread.
SB_API const char* sb_last_error();

// Version of the OpenVINO headers that this library was built with, and of the runtime loaded:
// "2026.4.1-22982-..." style texts.
SB_API const char* sb_build_version();
SB_API const char* sb_runtime_version();

// Reads a stage graph, rewrites it for paged attention, compiles it and makes its one request.
SB_API int sb_model_load(const char* xml_path,
                         const char* device,
                         const sb_property* properties,
                         size_t n_properties,
                         sb_model** model);
SB_API void sb_model_free(sb_model* model);

// Number of layers, that is of key and value caches.
SB_API int sb_model_layers(const sb_model* model, size_t* n_layers);
SB_API int sb_model_cache(const sb_model* model, size_t layer, sb_cache* cache);

// Threads that one inference runs on; 1 where the device does not tell.
SB_API int sb_model_threads(const sb_model* model, size_t* n_threads);

// Allocates n_blocks blocks for every layer. Earlier contents are lost.
SB_API int sb_model_allocate(sb_model* model, size_t n_blocks);

// Copies one block of every layer.
SB_API int sb_model_copy_block(sb_model* model, size_t from, size_t to);

// Runs a micro-batch. The output belongs to the model and lives until the next call: hidden states
// f32[n_rows, hidden_dim], or logits f32[n_logit_rows, vocab_size].
SB_API int sb_model_run(sb_model* model, const sb_batch* batch, const float** output, size_t* n_floats);
