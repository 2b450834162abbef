// C ABI for one stateful request whose KV cache is cut by reading and writing its state. See
// paged.hpp for errors and handles.
#pragma once

#include "paged.hpp"

struct sb_state;

// Compiles a stage that is the whole model, and makes one request.
SB_API int sb_state_load(const char* xml_path,
                         const char* device,
                         const sb_property* properties,
                         size_t n_properties,
                         sb_state** state);
SB_API void sb_state_free(sb_state* state);

// Appends token rows. The logits of the last row, f32[vocab_size], belong to the state and live
// until the next call.
SB_API int sb_state_append(sb_state* state,
                           const int64_t* token_ids,
                           size_t n_rows,
                           const float** logits,
                           size_t* n_floats);

// Cuts the cache to its first n_tokens tokens: every key and value is read, cut and written back.
SB_API int sb_state_trim(sb_state* state, size_t n_tokens);
