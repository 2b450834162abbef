//! `/tokenize` and `/detokenize`.

use serde_json::json;
use stagebus_schemas::messages::public::ChatMessage;

use crate::bed::{Bed, MODEL};
use crate::client;
use crate::scripted::Scripted;

#[tokio::test]
async fn text_becomes_tokens_and_back_with_a_local_shard_set() {
    let bed = Bed::new().await;
    let shards = bed.folder.path().to_owned();
    let gateway = bed.gateway(|settings| settings.shards = vec![shards]).await;
    let tokens = bed.text.encode("né", true).unwrap();
    let request = json!({"model": MODEL, "prompt": "né"});
    let found = client::post(gateway.address, "/tokenize", &request).await.json();
    let context = bed.manifest.dims.context_length;
    assert_eq!(found, json!({"count": tokens.len(), "max_model_len": context, "tokens": tokens}));
    let request = json!({"model": MODEL, "tokens": tokens});
    let found = client::post(gateway.address, "/detokenize", &request).await.json();
    assert_eq!(found, json!({"prompt": "né"}));
    let request = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    let found = client::post(gateway.address, "/tokenize", &request).await.json();
    let message = ChatMessage::new("user", "hi");
    assert_eq!(found["tokens"], json!(bed.text.encode_chat(&[message]).unwrap()));

    for (path, request, status) in [
        ("/tokenize", json!({"model": MODEL}), 400),
        ("/tokenize", json!({"model": MODEL, "prompt": "a", "messages": []}), 400),
        ("/tokenize", json!({"model": "other", "prompt": "a"}), 404),
        ("/detokenize", json!({"model": MODEL, "tokens": [258]}), 400),
        ("/detokenize", json!({"model": MODEL, "tokens": [-1]}), 400),
    ] {
        let response = client::post(gateway.address, path, &request).await;
        assert_eq!(response.status, status, "{request}");
        response.error();
    }
    gateway.end().await;
}

#[tokio::test]
async fn another_tokenizer_than_the_fleets_is_not_used() {
    let bed = Bed::new().await;
    let coordinator = Scripted::start(&bed).await;
    let other = tempfile::tempdir().unwrap();
    crate::shard_set::write(other.path(), 2);
    let folder = other.path().to_owned();
    let with_other = bed.gateway(|settings| settings.shards = vec![folder]).await;
    let without = bed.gateway(|_| {}).await;
    let request = json!({"model": MODEL, "prompt": "a"});
    for (gateway, code) in [(with_other, "shards_differ"), (without, "tokenizer_unavailable")] {
        coordinator.until_listed(&gateway).await;
        let response = client::post(gateway.address, "/tokenize", &request).await;
        assert_eq!((response.status, &response.error()["code"]), (501, &json!(code)));
        gateway.end().await;
    }
}
