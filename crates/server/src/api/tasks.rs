//! The tasks of the command `bert`: the responses are the objects that the commands print.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    extract::State,
    http::{HeaderValue, header},
    response::{Html, IntoResponse, Response},
};
use encoder::{Aggregation, Candidate, CharacterPositions, TextAttention, TextClassifier};
use picture::{HeadChoice, all_heads, choose, document, html_page};
use serde::{Deserialize, Serialize, Serializer};
use utoipa::ToSchema;

use super::{
    check_count, check_response, check_size, counted,
    embedding::{Options, Outputs, Texts},
    fields::optional_choice,
    large_response,
    nested::Scalar,
    ranking, response_of_size, with_truncated,
};
use crate::{
    Models,
    failure::{Failure, Kind, TeiFailures},
    input::Input,
    model::{Model, Task},
    models::text_name,
    responses::Computed,
};

/// Maximum number of answers per text, and of candidates per mask token.
const MAX_TOP: usize = 1000;
/// Number of values of an entity: label, score, text, start and end.
const VALUES_PER_ENTITY: usize = 5;
/// Number of bytes per token, to estimate the tokens of requests to `/tag`, `/answer` and
/// `/fill_mask`. The estimate is used for the estimated wait of requests, the estimated size of the
/// response, the metrics of the queue, and the log.
const BYTES_PER_TOKEN: usize = 4;

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClassifyRequest {
    /// Name of the model [default: the first sequence classifier]
    #[serde(default)]
    model: Option<String>,
    inputs: Texts,
}

#[derive(Serialize, ToSchema)]
struct Classified {
    text: String,
    /// The label with the highest score
    label: String,
    score: f32,
    /// The score of each label
    #[serde(serialize_with = "as_map")]
    #[schema(value_type = std::collections::BTreeMap<String, f32>)]
    scores: Vec<(String, f32)>,
}

/// Serialises pairs as a map in their order.
fn as_map<S: Serializer>(scores: &[(String, f32)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(scores.iter().map(|(label, score)| (label, score)))
}

/// Classify texts, as `bert classify`
#[utoipa::path(
    post,
    path = "/classify",
    tag = "Tasks",
    request_body(content = ClassifyRequest, example = json!({"inputs": ["I like you."]})),
    responses((status = 200, description = "the response", body = Vec<Classified>), TeiFailures)
)]
pub async fn classify(
    State(models): State<Models>,
    request: Input<ClassifyRequest>,
) -> Result<Response, Failure> {
    let ClassifyRequest { model, inputs } = request.value;
    let found = ranking::find(&models, model.as_deref())?;
    let texts = inputs.into_vec();
    check_count(&models, texts.len(), "inputs")?;
    let values = texts.len() * found.pipeline.labels().names().len();
    check_response(values, "inputs")?;
    let given = Arc::new(texts.clone());
    // As in the command, long texts are truncated.
    let options = Options::new("inputs");
    let tokenize = |classifier: &TextClassifier, texts: &[String]| Ok(classifier.tokenize(texts)?);
    let logits = ranking::logits(&models, &found, given, String::len, options, tokenize);
    let Outputs { values: logits, tokens, truncated } = logits.await?;
    let scores = found.pipeline.label_scores(logits);
    let names = found.pipeline.labels().distinct_names();
    let classified = |(text, scores): (String, Vec<f32>)| {
        let best = ranking::descending(&scores)[0];
        let (label, score) = (names[best].clone(), scores[best]);
        Classified { text, label, score, scores: names.iter().cloned().zip(scores).collect() }
    };
    let all: Vec<Classified> = texts.into_iter().zip(scores).map(classified).collect();
    let computed = Computed { model: found.name, texts: all.len(), tokens };
    let response = response_of_size(&models, &all, computed, values.max(tokens));
    Ok(with_truncated(response, truncated))
}

/// A part of a text.
#[derive(Serialize, ToSchema)]
struct Span {
    score: f32,
    text: String,
    /// Index of the first character, in Unicode code points
    start: usize,
    /// Index of the character after the last one
    end: usize,
}

impl Span {
    fn new(text: &mut CharacterPositions, score: f32, bytes: Range<usize>) -> Self {
        let Range { start, end } = text.range(&bytes);
        Self { score, text: text.text()[bytes].to_string(), start, end }
    }
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TagRequest {
    /// Name of the model [default: the first token classifier]
    #[serde(default)]
    model: Option<String>,
    inputs: Texts,
    /// How to join tokens into entities [default: simple]
    #[serde(default, deserialize_with = "optional_choice")]
    join: Option<Join>,
}

#[derive(Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Join {
    /// Each token with a label other than O is an entity
    None,
    /// Join adjacent tokens whose labels are equal without the prefix B- or I-; a label with B-
    /// starts a new entity
    #[default]
    Simple,
    /// Label each word by its first token; join words as in `simple`
    First,
    /// Like `first`, with the label whose mean score over the word's tokens is highest
    Average,
    /// Like `first`, with the label of the word's token that has the highest score
    Max,
}

impl From<Join> for Aggregation {
    fn from(join: Join) -> Self {
        match join {
            Join::None => Self::None,
            Join::Simple => Self::Simple,
            Join::First => Self::First,
            Join::Average => Self::Average,
            Join::Max => Self::Max,
        }
    }
}

#[derive(Serialize, ToSchema)]
struct Tagged {
    text: String,
    entities: Vec<Entity>,
}

#[derive(Serialize, ToSchema)]
struct Entity {
    label: String,
    #[serde(flatten)]
    span: Span,
}

/// Extract named entities, as `bert tag`
#[utoipa::path(
    post,
    path = "/tag",
    tag = "Tasks",
    request_body(
        content = TagRequest,
        example = json!({"inputs": "Ada Lovelace lived in London."}),
    ),
    responses((status = 200, description = "the response", body = Vec<Tagged>), TeiFailures)
)]
pub async fn tag(
    State(models): State<Models>,
    request: Input<TagRequest>,
) -> Result<Response, Failure> {
    let TagRequest { model, inputs, join } = request.value;
    let join = join.unwrap_or_default();
    let found = models.find(model.as_deref(), "token_classification", |task| match task {
        Task::TokenClassification(classifier) => Some(classifier.clone()),
        _ => None,
    })?;
    let classifier = found.pipeline;
    let values = AtomicUsize::new(0);
    let tag = move |text: String| {
        let entities = classifier.classify(&text, join.into())?;
        let more = VALUES_PER_ENTITY * entities.len();
        check_response(values.fetch_add(more, Ordering::Relaxed) + more, "inputs")?;
        let mut positions = CharacterPositions::new(&text);
        let entities = entities.into_iter().map(|entity| {
            let span = Span::new(&mut positions, entity.score, entity.range);
            Entity { label: entity.label, span }
        });
        Ok(Tagged { entities: entities.collect(), text })
    };
    // The number of entities is not known yet.
    let cost = |text: &str| Cost { tokens: estimated_tokens(text), values: 0 };
    for_each(&models, found.name, found.model.number(), inputs, cost, tag).await
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AnswerRequest {
    /// Name of the model [default: the first model that answers questions]
    #[serde(default)]
    model: Option<String>,
    question: String,
    /// The texts in which to find answers
    inputs: Texts,
    /// Number of answers per text [default: 1]
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1000)]
    top: Option<usize>,
}

#[derive(Serialize, ToSchema)]
struct Answered {
    text: String,
    /// In descending order of score
    answers: Vec<Span>,
    /// The score of "no answer"
    no_answer: f32,
}

/// Find the answer to a question in texts, as `bert answer`
#[utoipa::path(
    post,
    path = "/answer",
    tag = "Tasks",
    request_body(
        content = AnswerRequest,
        example = json!({"question": "Where?", "inputs": "Ada Lovelace lived in London."}),
    ),
    responses((status = 200, description = "the response", body = Vec<Answered>), TeiFailures)
)]
pub async fn answer_question(
    State(models): State<Models>,
    request: Input<AnswerRequest>,
) -> Result<Response, Failure> {
    let AnswerRequest { model, question, inputs, top } = request.value;
    let top = checked_top(top, 1)?;
    check_size("question", &question)?;
    let found = models.find(model.as_deref(), "question_answering", |task| match task {
        Task::QuestionAnswering(answerer) => Some(answerer.clone()),
        _ => None,
    })?;
    let answerer = found.pipeline;
    let question_tokens = estimated_tokens(&question);
    let cost = |text: &str| Cost {
        tokens: question_tokens + estimated_tokens(text),
        values: 4 * top, // text, score, start and end of each answer
    };
    let answer = move |text: String| {
        let encoder::Answers { answers, no_answer } = answerer.answer(&question, &text, top)?;
        let mut positions = CharacterPositions::new(&text);
        let answers = answers.into_iter();
        let answers = answers.map(|answer| Span::new(&mut positions, answer.score, answer.range));
        let answers = answers.collect();
        Ok(Answered { answers, no_answer, text })
    };
    for_each(&models, found.name, found.model.number(), inputs, cost, answer).await
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FillMaskRequest {
    /// Name of the model [default: the first masked language model]
    #[serde(default)]
    model: Option<String>,
    inputs: Texts,
    /// Number of candidates per mask token [default: 5]
    #[serde(default)]
    #[schema(minimum = 1, maximum = 1000)]
    top: Option<usize>,
}

#[derive(Serialize, ToSchema)]
struct Filled {
    text: String,
    /// The candidates of each mask token, in the order of the text
    gaps: Vec<Vec<Token>>,
}

#[derive(Serialize, ToSchema)]
struct Token {
    token: String,
    score: f32,
}

/// Predict the masked tokens of texts, as `bert fill-mask`
#[utoipa::path(
    post,
    path = "/fill_mask",
    tag = "Tasks",
    request_body(
        content = FillMaskRequest,
        example = json!({"inputs": "Paris is the [MASK] of France."}),
    ),
    responses((status = 200, description = "the response", body = Vec<Filled>), TeiFailures)
)]
pub async fn fill_mask(
    State(models): State<Models>,
    request: Input<FillMaskRequest>,
) -> Result<Response, Failure> {
    let FillMaskRequest { model, inputs, top } = request.value;
    let top = checked_top(top, 5)?;
    let found = models.find(model.as_deref(), "fill_mask", |task| match task {
        Task::FillMask(filler) => Some(filler.clone()),
        _ => None,
    })?;
    let filler = found.pipeline;
    let mask_token = filler.mask_token().to_string();
    let cost = |text: &str| {
        let gaps = text.matches(&mask_token).count();
        // Token and score of each candidate.
        Cost { tokens: estimated_tokens(text), values: 2 * gaps * top }
    };
    let fill = move |text: String| {
        let token = |Candidate { token, score, .. }| Token { token, score };
        let gaps = filler.fill(&text, top)?.into_iter();
        let gaps = gaps.map(|candidates| candidates.into_iter().map(token).collect()).collect();
        Ok(Filled { gaps, text })
    };
    for_each(&models, found.name, found.model.number(), inputs, cost, fill).await
}

struct Cost {
    /// The estimated number of tokens to compute.
    tokens: usize,
    /// The number of values in the response, besides the text; 0 if it is not known.
    values: usize,
}

/// Computes each text on the engine, and responds with a list. The message of a failure names the
/// text.
async fn for_each<T: Serialize + Send + 'static>(
    models: &Models,
    name: String,
    model: u64,
    inputs: Texts,
    cost: impl Fn(&str) -> Cost,
    compute: impl Fn(String) -> Result<T, Failure> + Send + Sync + 'static,
) -> Result<Response, Failure> {
    let texts = inputs.into_vec();
    check_count(models, texts.len(), "inputs")?;
    for (index, text) in texts.iter().enumerate() {
        check_size(&text_name(index), text)?;
    }
    let costs: Vec<Cost> = texts.iter().map(|text| cost(text)).collect();
    let tokens = costs.iter().map(|cost| cost.tokens).sum();
    let values = costs.iter().map(|cost| cost.values).sum();
    check_response(values, "inputs")?;
    let inputs = costs.iter().map(|cost| cost.tokens).zip(texts.into_iter().enumerate()).collect();
    let compute =
        move |(index, text)| compute(text).map_err(|failure| failure.with_name(&text_name(index)));
    let all = models.engine().map(model, inputs, compute).await?;
    let computed = Computed { model: name, texts: all.len(), tokens };
    // The response contains the texts and, for `/tag`, up to one entity per token, which `values`
    // does not count.
    Ok(response_of_size(models, &all, computed, values.max(VALUES_PER_ENTITY * tokens)))
}

/// The value of `top`, or the default.
///
/// # Errors
/// [`Kind::Invalid`] if `top` is 0 or more than [`MAX_TOP`].
fn checked_top(top: Option<usize>, default: usize) -> Result<usize, Failure> {
    let top = top.unwrap_or(default);
    match (1..=MAX_TOP).contains(&top) {
        true => Ok(top),
        false => Err(Failure::invalid("top", format!("top is {top}: expected 1 to {MAX_TOP}"))),
    }
}

fn estimated_tokens(text: &str) -> usize {
    text.len() / BYTES_PER_TOKEN + 1
}

#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttentionRequest {
    /// Name of the model [default: the first model]
    #[serde(default)]
    model: Option<String>,
    /// The text
    inputs: String,
    /// Second text of a pair
    #[serde(default)]
    pair: Option<String>,
    /// Layer to enlarge in a picture, from 0 [default: the last]
    #[serde(default)]
    layer: Option<usize>,
    /// Head to enlarge in a picture: a number from 0, `mean` or `all` [default: mean]
    #[serde(default)]
    head: Option<Head>,
    /// Form of the response [default: json]
    #[serde(default, deserialize_with = "optional_choice")]
    format: Option<Format>,
}

#[derive(Deserialize, ToSchema)]
#[serde(untagged, try_from = "Scalar")]
enum Head {
    Number(usize),
    Name(String),
}

impl TryFrom<Scalar> for Head {
    type Error = &'static str;

    fn try_from(value: Scalar) -> Result<Self, Self::Error> {
        let expected = "expected a whole number of at least 0, \"mean\" or \"all\"";
        match value {
            Scalar::Number(number) => number.try_into().map(Self::Number).map_err(|_| expected),
            Scalar::Text(name) => Ok(Self::Name(name)),
        }
    }
}

#[derive(Clone, Copy, Default, Deserialize, PartialEq, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Format {
    /// The weights of all heads
    #[default]
    Json,
    /// A picture
    Svg,
    /// A page with the picture
    Html,
}

#[derive(Serialize, ToSchema)]
struct Attention {
    /// The tokens, special tokens included
    tokens: Vec<String>,
    /// layers × heads × queries × keys
    weights: Vec<Vec<Vec<Vec<f32>>>>,
}

/// The attention weights of a text, as numbers or as a picture.
enum Drawn {
    Weights(Attention),
    Picture(String),
}

/// Show the attention weights of a text, as `bert attention`
#[utoipa::path(
    post,
    path = "/attention",
    tag = "Tasks",
    request_body(content = AttentionRequest, example = json!({"inputs": "I love AI"})),
    responses(
        (status = 200, description = "the response", content(
            (Attention = "application/json"),
            (String = "image/svg+xml"),
            (String = "text/html"),
        )),
        TeiFailures,
    )
)]
pub async fn attention(
    State(models): State<Models>,
    request: Input<AttentionRequest>,
) -> Result<Response, Failure> {
    let AttentionRequest { model, inputs, pair, layer, head, format } = request.value;
    let format = format.unwrap_or_default();
    let (name, model) = models.any(model.as_deref())?;
    let head = match head {
        None => HeadChoice::Mean,
        Some(Head::Number(number)) => HeadChoice::One(number),
        Some(Head::Name(name)) => name.parse().map_err(|expected| {
            Failure::invalid("head", format!("head {name:?} is unknown: {expected}"))
        })?,
    };
    check_size("inputs", &inputs)?;
    pair.iter().try_for_each(|pair| check_size("pair", pair))?;
    let tokens = count_tokens(&models, &model, &inputs, pair.as_deref()).await?;
    let config = model.task().encoder().config();
    let heads = config.num_hidden_layers * config.num_attention_heads;
    check_response(heads * tokens.pow(2), "inputs")?;
    let number = model.number();
    let read = move |text: String| {
        // A model of the server is an encoder, which has one kind of attention.
        let attention = model.attention().read(&text, pair.as_deref())?.swap_remove(0);
        let title = [Some(text.as_str()), pair.as_deref()];
        let title = title.into_iter().flatten().collect::<Vec<_>>().join(" / ");
        draw(attention, &title, layer, head, format)
    };
    let mut drawn = models.engine().map(number, vec![(tokens, inputs)], read).await?;
    let computed = Computed { model: name, texts: 1, tokens };
    Ok(match drawn.swap_remove(0) {
        Drawn::Weights(attention) => large_response(&models, &attention, computed),
        Drawn::Picture(html) if format == Format::Html => {
            counted(&models, Html(html).into_response(), computed)
        }
        Drawn::Picture(svg) => {
            let svg_type = HeaderValue::from_static("image/svg+xml");
            let response = ([(header::CONTENT_TYPE, svg_type)], svg).into_response();
            counted(&models, response, computed)
        }
    })
}

/// The number of tokens of a text or of a pair.
async fn count_tokens(
    models: &Models,
    model: &Arc<Model>,
    text: &str,
    pair: Option<&str>,
) -> Result<usize, Failure> {
    type Inputs = (String, Option<String>);
    let inputs: Inputs = (text.to_string(), pair.map(str::to_string));
    let length = |(text, pair): &Inputs| text.len() + pair.as_ref().map_or(0, String::len);
    let model = model.clone();
    let count = move |inputs: &[Inputs]| {
        let tokenizer = model.tokenizer();
        let count = |(text, pair): &Inputs| {
            let tokens = match pair {
                None => tokenizer.encode(&[text])?,
                Some(pair) => tokenizer.encode_pairs(&[(text, pair)])?,
            };
            Ok(tokens[0].input_ids.len())
        };
        inputs.iter().map(count).collect()
    };
    let counts = models.tokenize(Arc::new(vec![inputs]), length, text_name, count).await?;
    Ok(counts[0])
}

fn draw(
    attention: TextAttention,
    title: &str,
    layer: Option<usize>,
    head: HeadChoice,
    format: Format,
) -> Result<Drawn, Failure> {
    let invalid = |error: picture::Error| Failure::new(Kind::Invalid, error);
    // This checks `layer` and `head`, also if the response is JSON, which does not use them.
    let chosen = choose(&attention, layer, head).map_err(invalid)?;
    if format == Format::Json {
        let weights = all_heads(&attention).map_err(invalid)?;
        return Ok(Drawn::Weights(Attention { tokens: attention.queries, weights }));
    }
    let svg = document(title, &attention, &chosen).map_err(invalid)?;
    Ok(Drawn::Picture(if format == Format::Html { html_page(title, &svg) } else { svg }))
}
