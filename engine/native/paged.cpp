// See paged.hpp.
#include "paged.hpp"

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "guard.hpp"
#include "openvino/core/version.hpp"
#include "openvino/openvino.hpp"
#include "openvino/pass/manager.hpp"
#include "openvino/pass/sdpa_to_paged_attention.hpp"

namespace {

struct Cache {
    std::string key_name;
    std::string value_name;
    ov::element::Type key_type;
    ov::element::Type value_type;
    ov::Shape key_block;
    ov::Shape value_block;
    ov::Tensor key;
    ov::Tensor value;
};

// Shape of one block: the input's shape without its first, dynamic dimension.
ov::Shape block_shape(const ov::Output<const ov::Node>& input) {
    const auto& shape = input.get_partial_shape();
    OPENVINO_ASSERT(shape.rank().is_static() && shape.size() >= 2,
                    "cache input ", input.get_any_name(), " has no usable shape ", shape);
    ov::Shape block;
    for (size_t axis = 1; axis < shape.size(); ++axis) {
        OPENVINO_ASSERT(shape[axis].is_static(),
                        "cache input ", input.get_any_name(), " is dynamic beside its blocks: ", shape);
        block.push_back(static_cast<size_t>(shape[axis].get_length()));
    }
    return block;
}

size_t block_bytes(const ov::element::Type& type, const ov::Shape& block) {
    return (ov::shape_size(block) * type.bitwidth() + 7) / 8;
}

ov::Shape with_blocks(size_t n_blocks, const ov::Shape& block) {
    ov::Shape shape{n_blocks};
    shape.insert(shape.end(), block.begin(), block.end());
    return shape;
}

void copy_name(const std::string& name, char (&out)[16]) {
    std::strncpy(out, name.c_str(), sizeof(out) - 1);
    out[sizeof(out) - 1] = '\0';
}

// A tensor over the caller's memory; OpenVINO's interface takes it mutable but inputs are read.
template <typename T>
ov::Tensor view(const T* data, const ov::Shape& shape) {
    return ov::Tensor(ov::element::from<T>(), shape, const_cast<T*>(data));
}

}  // namespace

struct sb_model {
    ov::CompiledModel compiled;
    ov::InferRequest request;
    std::vector<Cache> caches;
    size_t n_blocks = 0;
};

const char* sb_last_error() {
    return last_error.c_str();
}

const char* sb_build_version() {
    static const std::string version = std::to_string(OPENVINO_VERSION_MAJOR) + "." +
                                       std::to_string(OPENVINO_VERSION_MINOR) + "." +
                                       std::to_string(OPENVINO_VERSION_PATCH);
    return version.c_str();
}

const char* sb_runtime_version() {
    return ov::get_openvino_version().buildNumber;
}

int sb_model_load(const char* xml_path,
                  const char* device,
                  const sb_property* properties,
                  size_t n_properties,
                  sb_model** model) {
    return guard([&] {
        ov::Core core;
        auto graph = core.read_model(xml_path);
        ov::pass::Manager manager;
        manager.register_pass<ov::pass::SDPAToPagedAttention>();
        manager.run_passes(graph);
        ov::AnyMap config;
        for (size_t idx = 0; idx < n_properties; ++idx) {
            config[properties[idx].key] = std::string(properties[idx].value);
        }
        auto loaded = std::make_unique<sb_model>();
        loaded->compiled = core.compile_model(graph, device, config);
        loaded->request = loaded->compiled.create_infer_request();
        for (size_t layer = 0;; ++layer) {
            Cache cache;
            cache.key_name = "key_cache." + std::to_string(layer);
            cache.value_name = "value_cache." + std::to_string(layer);
            size_t found = 0;
            for (const auto& input : loaded->compiled.inputs()) {
                const auto& names = input.get_names();
                if (names.count(cache.key_name)) {
                    cache.key_type = input.get_element_type();
                    cache.key_block = block_shape(input);
                    ++found;
                } else if (names.count(cache.value_name)) {
                    cache.value_type = input.get_element_type();
                    cache.value_block = block_shape(input);
                    ++found;
                }
            }
            if (found != 2) {
                break;
            }
            loaded->caches.push_back(std::move(cache));
        }
        OPENVINO_ASSERT(!loaded->caches.empty(), "the paged graph has no key_cache.0 and value_cache.0");
        *model = loaded.release();
    });
}

void sb_model_free(sb_model* model) {
    delete model;
}

int sb_model_layers(const sb_model* model, size_t* n_layers) {
    return guard([&] {
        *n_layers = model->caches.size();
    });
}

int sb_model_cache(const sb_model* model, size_t layer, sb_cache* out) {
    return guard([&] {
        const auto& cache = model->caches.at(layer);
        OPENVINO_ASSERT(cache.value_block.size() == 3, "a value block has the shape ", cache.value_block);
        out->key_block_bytes = block_bytes(cache.key_type, cache.key_block);
        out->value_block_bytes = block_bytes(cache.value_type, cache.value_block);
        copy_name(cache.key_type.get_type_name(), out->key_type);
        copy_name(cache.value_type.get_type_name(), out->value_type);
        out->block_tokens = cache.value_block[1];
        out->by_token = cache.key_block == cache.value_block && cache.key_type == cache.value_type;
    });
}

int sb_model_threads(const sb_model* model, size_t* n_threads) {
    return guard([&] {
        *n_threads = 1;
        for (const auto& name : model->compiled.get_property(ov::supported_properties)) {
            if (name == ov::inference_num_threads.name()) {
                const auto found = model->compiled.get_property(ov::inference_num_threads);
                *n_threads = found > 0 ? static_cast<size_t>(found) : 1;
            }
        }
    });
}

int sb_model_allocate(sb_model* model, size_t n_blocks) {
    return guard([&] {
        for (auto& cache : model->caches) {
            cache.key = ov::Tensor(cache.key_type, with_blocks(n_blocks, cache.key_block));
            cache.value = ov::Tensor(cache.value_type, with_blocks(n_blocks, cache.value_block));
            model->request.set_tensor(cache.key_name, cache.key);
            model->request.set_tensor(cache.value_name, cache.value);
        }
        model->n_blocks = n_blocks;
    });
}

int sb_model_copy_block(sb_model* model, size_t from, size_t to) {
    return guard([&] {
        OPENVINO_ASSERT(from < model->n_blocks && to < model->n_blocks,
                        "block ", from, " or ", to, " is not below ", model->n_blocks);
        for (auto& cache : model->caches) {
            for (auto* tensor : {&cache.key, &cache.value}) {
                const size_t bytes = tensor->get_byte_size() / model->n_blocks;
                auto* data = static_cast<uint8_t*>(tensor->data());
                std::memcpy(data + to * bytes, data + from * bytes, bytes);
            }
        }
    });
}

int sb_model_run(sb_model* model, const sb_batch* batch, const float** output, size_t* n_floats) {
    return guard([&] {
        auto& request = model->request;
        const ov::Shape rows{batch->n_rows};
        const ov::Shape begins{batch->n_sequences + 1};
        if (batch->token_ids) {
            request.set_tensor("input_ids", view(batch->token_ids, rows));
        } else {
            request.set_tensor("inputs_embeds", view(batch->hidden, {batch->n_rows, batch->hidden_dim}));
        }
        request.set_tensor("position_ids", view(batch->positions, rows));
        request.set_tensor("past_lens", view(batch->past_lens, {batch->n_sequences}));
        request.set_tensor("subsequence_begins", view(batch->sequence_begins, begins));
        request.set_tensor("block_indices", view(batch->block_indices, {batch->n_block_indices}));
        request.set_tensor("block_indices_begins", view(batch->block_begins, begins));
        request.set_tensor("max_context_len", view(&batch->max_context_len, {}));
        if (batch->logit_rows) {
            request.set_tensor("logit_rows", view(batch->logit_rows, {batch->n_logit_rows}));
        }
        request.infer();
        const auto result = request.get_output_tensor(0);
        *output = result.data<const float>();
        *n_floats = result.get_size();
    });
}
