//! Requests of completions, as clients write them.

use super::*;
use serde_json::{Value, json};

fn prompts(prompt: Value) -> Result<Vec<Input>, String> {
    let request = json!({"model": "m", "prompt": prompt});
    let request: CompletionRequest =
        serde_json::from_value(request).map_err(|error| error.to_string())?;
    Ok(request.prompt.into_inputs())
}

#[test]
fn a_prompt_has_four_forms() {
    let text = |text: &str| Input::Text(text.to_owned());
    assert_eq!(prompts(json!("a")), Ok(vec![text("a")]));
    assert_eq!(prompts(json!(["a", "b"])), Ok(vec![text("a"), text("b")]));
    assert_eq!(prompts(json!([1, 2])), Ok(vec![Input::Tokens(vec![1, 2])]));
    let lists = vec![Input::Tokens(vec![1]), Input::Tokens(vec![2, 3])];
    assert_eq!(prompts(json!([[1], [2, 3]])), Ok(lists));
    for wrong in [json!(["a", 1]), json!([-1]), json!(3), json!({"a": 1}), json!([[1], "a"])] {
        let error = prompts(wrong.clone()).expect_err(&wrong.to_string());
        assert!(error.contains("expected a text"), "{error}");
    }
}
