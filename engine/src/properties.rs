//! Which OpenVINO properties a stage is compiled with.
//!
//! The values for the CPU are measured. Other devices get only what OpenVINO documents for all of
//! them: `PERFORMANCE_HINT`, and in the exact profile `INFERENCE_PRECISION_HINT`.

use crate::options::{EngineOptions, Profile};

/// The CPU's own properties, whatever the profile: one stream, because one thread infers, and no
/// pinning, because that binds the first thread of every process to core 0, and with it all
/// stages of a machine.
const CPU: [(&str, &str); 2] = [("NUM_STREAMS", "1"), ("ENABLE_CPU_PINNING", "NO")];

/// No kernel that rounds inputs, no shorter numbers.
const CPU_EXACT: [(&str, &str); 3] = [
    ("INFERENCE_PRECISION_HINT", "f32"),
    ("KV_CACHE_PRECISION", "f32"),
    ("DYNAMIC_QUANTIZATION_GROUP_SIZE", "0"),
];

/// 8-bit KV caches with one scale per token and head. The default scale of keys, per channel over
/// a group of tokens, makes a key depend on its neighbours, masked ones included.
const CPU_FAST: [(&str, &str); 2] =
    [("KV_CACHE_PRECISION", "u8"), ("KEY_CACHE_QUANT_MODE", "BY_TOKEN")];

/// All properties, later ones overriding earlier ones; every key once.
pub(crate) fn properties(
    options: &EngineOptions,
    cache_dir: Option<&str>,
) -> Vec<(String, String)> {
    let is_cpu = options.device == "CPU";
    let mut list = vec![("PERFORMANCE_HINT", "LATENCY")];
    match options.profile {
        Profile::Exact if is_cpu => list.extend(CPU.into_iter().chain(CPU_EXACT)),
        Profile::Exact => list.push(("INFERENCE_PRECISION_HINT", "f32")),
        Profile::Fast if is_cpu => list.extend(CPU.into_iter().chain(CPU_FAST)),
        Profile::Fast => {}
    }
    let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    let mut properties: Vec<_> = list.into_iter().map(owned).collect();
    if let Some(threads) = options.threads {
        set(&mut properties, "INFERENCE_NUM_THREADS", &threads.to_string());
    }
    if let Some(cache_dir) = cache_dir {
        set(&mut properties, "CACHE_DIR", cache_dir);
    }
    for (key, value) in &options.properties {
        set(&mut properties, key, value);
    }
    properties
}

/// Bytes of the KV cache per stored number, and per head and token for scale and zero point, at
/// an OpenVINO precision; `None` for one that is not known here.
pub(crate) fn kv_bytes(precision: &str) -> Option<(f64, f64)> {
    match precision {
        "f32" => Some((4.0, 0.0)),
        "f16" | "bf16" => Some((2.0, 0.0)),
        "u8" | "i8" => Some((1.0, 8.0)),
        "u4" | "i4" => Some((0.5, 8.0)),
        _ => None,
    }
}

fn set(properties: &mut Vec<(String, String)>, key: &str, value: &str) {
    match properties.iter_mut().find(|(present, _)| present == key) {
        Some((_, present)) => value.clone_into(present),
        None => properties.push((key.to_owned(), value.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value<'a>(properties: &'a [(String, String)], key: &str) -> Option<&'a str> {
        properties.iter().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    #[test]
    fn the_users_properties_win() {
        let options = EngineOptions {
            threads: Some(2),
            properties: vec![("KV_CACHE_PRECISION".to_owned(), "bf16".to_owned())],
            ..EngineOptions::default()
        };
        let list = properties(&options, Some("blobs"));
        assert_eq!(value(&list, "KV_CACHE_PRECISION"), Some("bf16"));
        assert_eq!(value(&list, "KEY_CACHE_QUANT_MODE"), Some("BY_TOKEN"));
        assert_eq!(value(&list, "INFERENCE_NUM_THREADS"), Some("2"));
        assert_eq!(value(&list, "CACHE_DIR"), Some("blobs"));
    }

    #[test]
    fn other_devices_get_no_property_of_the_cpu() {
        let options = EngineOptions { device: "GPU".to_owned(), ..EngineOptions::default() };
        assert_eq!(properties(&options, None).len(), 1);
        let exact = EngineOptions { profile: Profile::Exact, ..options };
        assert_eq!(value(&properties(&exact, None), "INFERENCE_PRECISION_HINT"), Some("f32"));
    }
}
