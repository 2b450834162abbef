// See state.hpp.
#include "state.hpp"

#include <memory>
#include <vector>

#include "guard.hpp"
#include "openvino/openvino.hpp"

namespace {

// Axis of the tokens in a key or value [batch, heads, tokens, head size].
constexpr size_t TOKENS = 2;

template <typename T>
ov::Tensor view(const T* data, const ov::Shape& shape) {
    return ov::Tensor(ov::element::from<T>(), shape, const_cast<T*>(data));
}

}  // namespace

struct sb_state {
    ov::CompiledModel compiled;
    ov::InferRequest request;
    size_t n_tokens = 0;
};

int sb_state_load(const char* xml_path,
                  const char* device,
                  const sb_property* properties,
                  size_t n_properties,
                  sb_state** state) {
    return guard([&] {
        ov::Core core;
        ov::AnyMap config;
        for (size_t idx = 0; idx < n_properties; ++idx) {
            config[properties[idx].key] = std::string(properties[idx].value);
        }
        auto loaded = std::make_unique<sb_state>();
        loaded->compiled = core.compile_model(xml_path, device, config);
        loaded->request = loaded->compiled.create_infer_request();
        *state = loaded.release();
    });
}

void sb_state_free(sb_state* state) {
    delete state;
}

int sb_state_append(sb_state* state,
                    const int64_t* token_ids,
                    size_t n_rows,
                    const float** logits,
                    size_t* n_floats) {
    return guard([&] {
        OPENVINO_ASSERT(n_rows > 0, "no rows to append");
        auto& request = state->request;
        std::vector<int64_t> mask(state->n_tokens + n_rows, 1);
        std::vector<int64_t> positions(n_rows);
        for (size_t row = 0; row < n_rows; ++row) {
            positions[row] = static_cast<int64_t>(state->n_tokens + row);
        }
        const int32_t beam = 0;
        const int64_t last = static_cast<int64_t>(n_rows) - 1;
        request.set_tensor("input_ids", view(token_ids, {1, n_rows}));
        request.set_tensor("attention_mask", view(mask.data(), {1, mask.size()}));
        request.set_tensor("position_ids", view(positions.data(), {1, n_rows}));
        request.set_tensor("beam_idx", view(&beam, {1}));
        request.set_tensor("logit_rows", view(&last, {1}));
        request.infer();
        state->n_tokens += n_rows;
        const auto output = request.get_output_tensor(0);
        *logits = output.data<const float>();
        *n_floats = output.get_size();
    });
}

int sb_state_trim(sb_state* state, size_t n_tokens) {
    return guard([&] {
        OPENVINO_ASSERT(n_tokens > 0 && n_tokens <= state->n_tokens,
                        "cannot cut ", state->n_tokens, " tokens to ", n_tokens);
        for (auto& variable : state->request.query_state()) {
            const ov::Tensor full = variable.get_state();
            ov::Shape end = full.get_shape();
            OPENVINO_ASSERT(end.size() == 4 && end[TOKENS] == state->n_tokens,
                            "state ", variable.get_name(), " has the shape ", end);
            end[TOKENS] = n_tokens;
            // A copy: what get_state returns may be a view of what set_state writes.
            ov::Tensor cut(full.get_element_type(), end);
            ov::Tensor(full, ov::Coordinate{0, 0, 0, 0}, ov::Coordinate(end)).copy_to(cut);
            variable.set_state(cut);
        }
        state->n_tokens = n_tokens;
    });
}
