//! Which requests are honoured, and what the others are told.

use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::RequestId;
use stagebus_schemas::messages::control::Priority;
use stagebus_schemas::messages::public::{
    ChatMessage, Function, Limits, MAX_TOOLS, PromptInput, PromptRequest, RequestError, Tool,
    ToolKind, ValidRequest,
};
use stagebus_schemas::messages::sampling::Sampling;

fn limits() -> Limits {
    Limits { max_stops: 2, max_stop_bytes: 4, max_messages: 3, ..Limits::new(8, 100) }
}

fn text(change: impl FnOnce(&mut PromptRequest)) -> Result<ValidRequest, RequestError> {
    let mut request = PromptRequest { prompt: Some("a".into()), ..PromptRequest::default() };
    change(&mut request);
    request.validate(&limits())
}

fn tokens(tokens: Vec<u32>) -> Result<ValidRequest, RequestError> {
    text(|request| (request.prompt, request.tokens) = (None, Some(tokens)))
}

fn messages(entries: &[(&str, &str)]) -> Result<ValidRequest, RequestError> {
    let entry = |(role, content): &(&str, &str)| ChatMessage::new(role, *content);
    let entries = entries.iter().map(entry).collect();
    text(|request| (request.prompt, request.messages) = (None, Some(entries)))
}

#[test]
fn a_plain_request_is_taken_apart() {
    let id = RequestId::new("r").expect("an id");
    let valid = text(|request| {
        request.request_id = Some(id.clone());
        request.max_tokens = Some(1);
        request.stop = vec!["ab".into()];
        request.stream = Some(false);
    });
    let expected = ValidRequest {
        request_id: Some(id),
        input: PromptInput::Text("a".into()),
        max_tokens: Some(1),
        sampling: Sampling::default(),
        stop: vec!["ab".into()],
        stream: false,
        draft_tokens: None,
        draft_windows: None,
        draft_alternatives: None,
        priority: Priority::Interactive,
        timings: false,
    };
    assert_eq!(valid, Ok(expected));
    assert!(text(|_| {}).expect("valid").stream);
    assert_eq!(tokens(vec![0, 99]).expect("valid").input, PromptInput::Tokens(vec![0, 99]));
    let chat = messages(&[("user", "")]).expect("valid");
    assert!(matches!(chat.input, PromptInput::Messages { messages, .. } if messages.len() == 1));
}

#[test]
fn exactly_one_prompt_is_wanted() {
    let none = PromptRequest::default().validate(&limits());
    assert_eq!(none, Err(RequestError::Input { found: 0 }));
    let two = text(|request| request.tokens = Some(vec![1]));
    assert_eq!(two, Err(RequestError::Input { found: 2 }));
    let three = text(|request| {
        request.tokens = Some(Vec::new());
        request.messages = Some(Vec::new());
    });
    assert_eq!(three, Err(RequestError::Input { found: 3 }));
}

#[test]
fn an_empty_or_overlong_prompt_is_refused() {
    let empty = |result: Result<_, RequestError>| matches!(result, Err(RequestError::Empty { .. }));
    assert!(empty(text(|request| request.prompt = Some(String::new()))));
    assert!(empty(tokens(Vec::new())));
    assert!(empty(messages(&[])));
    assert!(empty(messages(&[("", "a")])));
    let long = "r".repeat(65);
    let too_long =
        |result: Result<_, RequestError>| matches!(result, Err(RequestError::TooLong { .. }));
    assert!(too_long(messages(&[(&long, "a")])));
    assert!(too_long(messages(&[("user", "a"); 4])));
    assert!(tokens(vec![1; 7]).is_ok());
    assert_eq!(tokens(vec![1; 8]), Err(RequestError::Context { found: 8, context_len: 8 }));
    assert_eq!(
        tokens(vec![1, 100]),
        Err(RequestError::TokenId { index: 1, found: 100, vocab_size: 100 })
    );
    assert!(limits().check_prompt_len(7).is_ok());
    assert!(limits().check_prompt_len(usize::MAX).is_err());
}

#[test]
fn stop_texts_are_limited() {
    let stops = |stops: &[&str]| {
        text(|request| request.stop = stops.iter().map(|stop| (*stop).to_owned()).collect())
    };
    assert!(stops(&["abcd", "b"]).is_ok());
    assert!(matches!(stops(&["a", "b", "c"]), Err(RequestError::TooLong { field: "stop", .. })));
    assert!(matches!(stops(&["abcde"]), Err(RequestError::TooLong { found: 5, limit: 4, .. })));
    assert!(matches!(stops(&[""]), Err(RequestError::Empty { .. })));
}

#[test]
fn sampling_fields_are_honoured() {
    let valid = text(|request| {
        request.temperature = Some(0.7);
        request.top_p = Some(0.9);
        request.top_k = Some(40);
        request.min_p = Some(0.05);
        request.seed = Some(u64::MAX);
        request.repetition_penalty = Some(1.1);
        request.presence_penalty = Some(-2.0);
        request.frequency_penalty = Some(2.0);
        request.logit_bias = [(99, -100.0), (3, 1.5)].into();
        request.logprobs = Some(true);
        request.top_logprobs = Some(20);
    });
    let expected = Sampling {
        temperature: 0.7,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.05,
        repetition_penalty: 1.1,
        presence_penalty: -2.0,
        frequency_penalty: 2.0,
        logit_bias: vec![(3, 1.5), (99, -100.0)],
        seed: u64::MAX,
        top_logprobs: Some(20),
        constraint: None,
    };
    assert_eq!(valid.expect("valid").sampling, expected);
    let top = |logprobs| text(|request| request.logprobs = logprobs).expect("valid").sampling;
    assert_eq!(top(None).top_logprobs, None);
    assert_eq!(top(Some(false)).top_logprobs, None);
    assert_eq!(top(Some(true)).top_logprobs, Some(0));
}

#[test]
fn only_drawn_tokens_need_a_seed() {
    let seed = |temperature: Option<f32>, top_k, seed: Option<u64>| {
        let valid = text(|request| {
            (request.temperature, request.top_k, request.seed) = (temperature, top_k, seed);
        });
        valid.expect("valid").sampling.seed
    };
    for (temperature, top_k) in
        [(None, None), (Some(0.0), None), (Some(-0.0), Some(40)), (Some(1e-6), None)]
    {
        assert_eq!(seed(temperature, top_k, None), 0, "{temperature:?} {top_k:?}");
    }
    assert_eq!(seed(Some(0.7), Some(1), None), 0);
    assert_eq!(seed(Some(0.7), None, Some(0)), 0, "zero is a seed like any other");
    let random = seed(Some(0.7), None, None);
    assert!(random < 1 << 53, "a JSON reader would round {random}");
    assert_ne!(random, seed(Some(0.7), None, None));
}

#[test]
fn a_bias_for_what_is_not_there_or_against_everything_is_refused() {
    let bias = |bias: &[(u32, f32)]| text(|r| r.logit_bias = bias.iter().copied().collect());
    assert_eq!(
        bias(&[(1, 0.0), (100, 1.0)]),
        Err(RequestError::BiasToken { found: 100, vocab_size: 100 })
    );
    let all: Vec<(u32, f32)> = (0..100).map(|token| (token, -100.0)).collect();
    let error = bias(&all).expect_err("nothing is left");
    assert_eq!(error, RequestError::AllForbidden { vocab_size: 100 });
    assert_eq!(ErrorReply::from(error).class, ErrorClass::InvalidRequest);
    assert!(bias(&all[1..]).is_ok());
    let wide = Limits::new(8, 5000);
    let many = PromptRequest {
        prompt: Some("a".into()),
        logit_bias: (0..4097).map(|token| (token, 1.0)).collect(),
        ..PromptRequest::default()
    };
    let error = many.validate(&wide).expect_err("too many");
    assert!(matches!(error, RequestError::TooLong { field: "logit_bias", .. }), "{error}");
}

#[test]
fn numbers_out_of_range_are_refused_by_name() {
    let field = |change: fn(&mut PromptRequest)| match text(change) {
        Err(RequestError::Range { field, .. }) => Some(field),
        _ => None,
    };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -100.1, 1e30] {
        let set = |change: fn(&mut PromptRequest, f32)| {
            text(|request| change(request, bad)).expect_err("out of range")
        };
        for error in [
            set(|request, bad| request.temperature = Some(bad)),
            set(|request, bad| request.top_p = Some(bad)),
            set(|request, bad| request.min_p = Some(bad)),
            set(|request, bad| request.repetition_penalty = Some(bad)),
            set(|request, bad| request.presence_penalty = Some(bad)),
            set(|request, bad| request.frequency_penalty = Some(bad)),
            set(|request, bad| request.logit_bias = [(1, bad)].into()),
        ] {
            assert!(matches!(error, RequestError::Range { .. }), "{bad}: {error}");
        }
    }
    assert_eq!(field(|request| request.top_p = Some(1.1)), Some("top_p"));
    assert_eq!(field(|request| request.top_p = Some(0.0)), Some("top_p"));
    assert_eq!(field(|request| request.max_tokens = Some(0)), Some("max_tokens"));
    assert_eq!(field(|request| request.min_p = Some(1.0)), None);
    assert_eq!(field(|request| request.repetition_penalty = Some(0.0)), Some("repetition_penalty"));
    let top = |logprobs, n| {
        text(|request| (request.logprobs, request.top_logprobs) = (logprobs, Some(n)))
    };
    assert!(matches!(top(Some(true), 21), Err(RequestError::Range { field: "top_logprobs", .. })));
    assert!(matches!(top(None, 1), Err(RequestError::Needs { field: "top_logprobs", .. })));
    assert!(top(Some(false), 0).is_ok());
}

#[test]
fn tools_need_a_chat_and_names() {
    let tool = |name: &str| Tool {
        kind: ToolKind::Function,
        function: Function { name: name.to_owned(), description: None, parameters: None },
    };
    let chat = |tools: Vec<Tool>| {
        let messages = Some(vec![ChatMessage::new("user", "a")]);
        PromptRequest { messages, tools, ..PromptRequest::default() }.validate(&limits())
    };
    let valid = chat(vec![tool("f")]).expect("valid");
    assert!(matches!(valid.input, PromptInput::Messages { tools, .. } if tools == [tool("f")]));
    assert_eq!(chat(vec![tool("")]), Err(RequestError::Empty { field: "a name of tools" }));
    let many = chat(vec![tool("f"); MAX_TOOLS + 1]);
    assert!(matches!(many, Err(RequestError::TooLong { field: "tools", .. })), "{many:?}");
    let alone = text(|request| request.tools = vec![tool("f")]);
    assert_eq!(alone, Err(RequestError::Needs { field: "tools", needs: "messages" }));
}
