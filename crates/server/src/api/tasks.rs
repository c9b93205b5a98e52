//! The tasks of the command `encodle`: the responses are the objects that the commands print.

use std::{ops::Range, sync::Arc};

use axum::{
    extract::State,
    http::{HeaderValue, header},
    response::{Html, IntoResponse, Response},
};
use encoder::{
    Aggregation, Candidate, CharacterPositions, TextAttention, TextClassifier, TextTokenizer,
    TextWindows, Tokens,
};
use picture::{HeadChoice, choose, document, html_page};
use serde::{Deserialize, Serialize, Serializer};
use utoipa::ToSchema;

use super::{
    check_count, check_response, check_size, counted,
    embedding::{Options, Outputs, Texts, compute, sequence_bytes},
    fields::optional_choice,
    list_response,
    nested::Scalar,
    object_response, ranking, with_truncated,
};
use crate::{
    Models,
    engine::{Sequence, Target},
    failure::{Failure, Kind, TeiFailures},
    input::Input,
    memory::Share,
    model::{Model, Task},
    models::text_name,
    responses::Computed,
    sending::{elements, nested_elements},
};

/// Maximum number of answers per text, and of candidates per mask token.
const MAX_TOP: usize = 1000;
/// Bytes of a token for the tasks on tokens: the id and the type, the position, the range and the
/// word in the text, and an entity.
const TOKEN_BYTES: usize = 128;
/// Bytes of an answer without its text.
const ANSWER_BYTES: usize = 32;
/// Bytes of a candidate for a mask token.
const CANDIDATE_BYTES: usize = 96;

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

/// Classify texts, as `encodle classify`
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
    let logits = ranking::logits(&models, &found, given, 0, options, tokenize);
    let Outputs { values, tokens, truncated, memory } = logits.await?;
    let scores = found.pipeline.label_scores(values);
    let names = found.pipeline.labels().distinct_names();
    let computed = Computed { model: found.name, texts: texts.len(), tokens };
    let classified = move |(text, scores): (String, Vec<f32>)| {
        let best = ranking::descending(&scores)[0];
        let (label, score) = (names[best].clone(), scores[best]);
        Classified { text, label, score, scores: names.iter().cloned().zip(scores).collect() }
    };
    let all = texts.into_iter().zip(scores).map(classified);
    let memory = memory.with_body(request.bytes);
    let response = list_response(&models, elements(all), memory, computed);
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

/// Extract named entities, as `encodle tag`
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
    let (classifier, target) = (found.pipeline.clone(), found.model.head(found.pipeline));
    let (tokenizer, own) = (found.model.tokenizer(), [classifier.clone(), classifier.clone()]);
    let [count, tokenize] = own;
    let windows = Windows {
        more: 0,
        bytes_per_text: 0,
        values_per_token: classifier.labels().names().len(),
        count: move |text: &str| count.count_tokens(text),
        tokenize: move |text: &str| tokenize.tokenize(text),
    };
    let (texts, memory) = windows.of_texts(&models, tokenizer, inputs).await?;
    let memory = memory.with_body(request.bytes);
    let tag = move |windows: TextWindows, scores: &[Vec<f32>]| {
        classifier.entities(&windows, scores, join.into())
    };
    let tagged = |text: String, entities: Vec<encoder::Entity>| {
        let mut positions = CharacterPositions::new(&text);
        let entities = entities.into_iter().map(|entity| {
            let span = Span::new(&mut positions, entity.score, entity.range);
            Entity { label: entity.label, span }
        });
        Tagged { entities: entities.collect(), text }
    };
    for_each_text(&models, found.name, target, texts, memory, tag, tagged).await
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

/// Find the answer to a question in texts, as `encodle answer`
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
    let (answerer, target) = (found.pipeline.clone(), found.model.head(found.pipeline));
    let (tokenizer, own) = (found.model.tokenizer(), [answerer.clone(), answerer.clone()]);
    let ([count, tokenize], asked) = (own, question.clone());
    let windows = Windows {
        more: question.len(),
        bytes_per_text: ANSWER_BYTES * top,
        values_per_token: 2,
        count: move |text: &str| count.count_tokens(&asked, text),
        tokenize: move |text: &str| tokenize.tokenize(&question, text),
    };
    let (texts, memory) = windows.of_texts(&models, tokenizer, inputs).await?;
    let memory = memory.with_body(request.bytes);
    let answer =
        move |windows: TextWindows, logits: &[Vec<f32>]| answerer.answers(&windows, logits, top);
    let answered = |text: String, found: encoder::Answers| {
        let mut positions = CharacterPositions::new(&text);
        let answers = found.answers.into_iter();
        let answers = answers.map(|answer| Span::new(&mut positions, answer.score, answer.range));
        let answers = answers.collect();
        Answered { answers, no_answer: found.no_answer, text }
    };
    for_each_text(&models, found.name, target, texts, memory, answer, answered).await
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

/// Predict the masked tokens of texts, as `encodle fill-mask`
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
    let texts = checked_texts(&models, inputs)?;
    let (tokenizer, own) = (found.model.tokenizer(), filler.clone());
    let mask_token = filler.mask_token();
    let gaps = texts.iter().map(|(_, text)| text.matches(mask_token).count()).sum::<usize>();
    check_response(2 * gaps * top, "inputs")?; // token and score of each candidate
    let lengths = texts.iter().map(|(_, text)| text.len());
    let bytes = sequence_bytes(tokenizer, lengths) + CANDIDATE_BYTES * gaps * top;
    let memory = models.take_memory(bytes, "inputs").await?.with_body(request.bytes);
    let tokenized = models.tokenize(tokenizer, texts.clone(), 0, text_name, move |texts| {
        let tokenize = |(index, text): &(usize, String)| named(*index, own.tokenize(text));
        texts.iter().map(tokenize).collect()
    });
    let tokenized: Vec<Tokens> = tokenized.await?;
    let tokens = tokenized.iter().map(|tokens| tokens.input_ids.len()).sum();
    let calls = tokenized.into_iter().enumerate();
    let calls = calls.map(|(i, tokens)| (tokens.input_ids.len(), (i, tokens))).collect();
    let fill = move |(index, tokens): (usize, Tokens)| {
        let gaps = named(index, filler.fill_tokens(&tokens, top))?.into_iter();
        let token = |Candidate { token, score, .. }| Token { token, score };
        Ok(gaps.map(|gap| gap.into_iter().map(token).collect()).collect::<Vec<Vec<Token>>>())
    };
    let gaps = models.engine().map(found.model.number(), calls, fill).await?;
    let computed = Computed { model: found.name, texts: gaps.len(), tokens };
    let filled = gaps.into_iter().enumerate();
    let filled = filled.map(move |(i, gaps)| Filled { text: texts[i].1.clone(), gaps });
    Ok(list_response(&models, elements(filled), memory, computed))
}

/// The texts of a request, with their indices.
///
/// # Errors
/// The errors of [`check_count`] and, for each text, of [`check_size`].
fn checked_texts(models: &Models, inputs: Texts) -> Result<Arc<Vec<(usize, String)>>, Failure> {
    let texts = inputs.into_vec();
    check_count(models, texts.len(), "inputs")?;
    for (index, text) in texts.iter().enumerate() {
        check_size(&text_name(index), text)?;
    }
    Ok(Arc::new(texts.into_iter().enumerate().collect()))
}

/// A result for the text at an index. The message of a failure names the text.
fn named<T>(index: usize, result: Result<T, impl Into<Failure>>) -> Result<T, Failure> {
    result.map_err(|failure| failure.into().with_name(&text_name(index)))
}

/// How the texts of a request become windows.
struct Windows<C, T> {
    /// The number of bytes that are tokenized with each text.
    more: usize,
    /// The number of bytes of the results of a text.
    bytes_per_text: usize,
    values_per_token: usize,
    /// Counts the tokens of the windows of a text.
    count: C,
    tokenize: T,
}

impl<C, T> Windows<C, T>
where
    C: Fn(&str) -> encoder::Result<usize> + Send + Sync + 'static,
    T: Fn(&str) -> encoder::Result<TextWindows> + Send + Sync + 'static,
{
    /// The windows of each text, with the memory for them and their values. The texts are tokenized
    /// twice, because the memory is known only after their tokens are counted.
    async fn of_texts(
        self,
        models: &Models,
        tokenizer: &TextTokenizer,
        inputs: Texts,
    ) -> Result<(Vec<(String, TextWindows)>, Share), Failure> {
        let Self { more, bytes_per_text, values_per_token, count, tokenize } = self;
        let texts = checked_texts(models, inputs)?;
        let counts = models.tokenize(tokenizer, texts.clone(), more, text_name, move |texts| {
            texts.iter().map(|(index, text)| named(*index, count(text))).collect()
        });
        let tokens: usize = counts.await?.into_iter().sum();
        let bytes = bytes_per_text * texts.len() + (TOKEN_BYTES + 4 * values_per_token) * tokens;
        let memory = models.take_memory(bytes, "inputs").await?;
        let windows = models.tokenize(tokenizer, texts.clone(), more, text_name, move |texts| {
            texts.iter().map(|(index, text)| named(*index, tokenize(text))).collect()
        });
        let windows = windows.await?;
        let texts = Arc::unwrap_or_clone(texts).into_iter().map(|(_, text)| text);
        Ok((texts.zip(windows).collect(), memory))
    }
}

/// Computes the windows of each text on the engine, and responds with a list. `finish` returns the
/// result of a text, from its windows and their values; `element` returns the element of the list
/// when it is sent. The message of a failure names the text.
async fn for_each_text<R: Send + 'static, T: Serialize + 'static>(
    models: &Models,
    name: String,
    target: Target,
    mut texts: Vec<(String, TextWindows)>,
    memory: Share,
    finish: impl Fn(TextWindows, &[Vec<f32>]) -> encoder::Result<R> + Send + 'static,
    element: impl Fn(String, R) -> T + Send + 'static,
) -> Result<Response, Failure> {
    let counts: Vec<usize> = texts.iter().map(|(_, windows)| windows.sequences().len()).collect();
    let sequences = texts.iter_mut().flat_map(|(_, windows)| windows.take_sequences());
    let sequences: Vec<Sequence> = sequences.map(|tokens| Sequence { tokens, prompt: 0 }).collect();
    let Outputs { values, tokens, memory, .. } = compute(models, target, sequences, memory).await?;
    let finished = models.on_thread(move || {
        let mut rest = &values[..];
        let finish = |(index, (count, (text, windows)))| {
            let own;
            (own, rest) = rest.split_at(count);
            Ok((text, named(index, finish(windows, own))?))
        };
        let texts = counts.into_iter().zip(texts).enumerate();
        (texts.map(finish).collect::<Result<Vec<(String, R)>, Failure>>(), memory)
    });
    let (all, memory) = finished.await?;
    let all = all?;
    let computed = Computed { model: name, texts: all.len(), tokens };
    let all = all.into_iter().map(move |(text, result)| element(text, result));
    Ok(list_response(models, elements(all), memory, computed))
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
    /// The weights of all layers and heads, `(L, H, T, T)`, row after row.
    Weights {
        tokens: Vec<String>,
        weights: Vec<f32>,
        heads: usize,
    },
    Picture(String),
}

/// Show the attention weights of a text, as `encodle attention`
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
    // The weights of each layer, and of all together.
    let memory = models.take_memory(2 * 4 * heads * tokens.pow(2), "inputs").await?;
    let (number, own) = (model.number(), model.clone());
    let title = [Some(inputs.as_str()), pair.as_deref()];
    let title = title.into_iter().flatten().collect::<Vec<_>>().join(" / ");
    // A model of the server is an encoder, which has one kind of attention.
    let read = move |text: String| Ok(own.attention().read(&text, pair.as_deref())?.swap_remove(0));
    let mut read = models.engine().map(number, vec![(tokens, inputs)], read).await?;
    let attention = read.swap_remove(0);
    let computed = Computed { model: name, texts: 1, tokens };
    let drawn = models.on_thread(move || draw(attention, &title, layer, head, format));
    Ok(match drawn.await?? {
        Drawn::Weights { tokens, weights, heads } => {
            let size = tokens.len();
            let body = Attention { tokens, weights: vec![] };
            let weights = Arc::new(weights);
            let layers = (0..weights.len() / (heads * size * size)).map(move |layer| {
                let weights = weights.clone();
                (0..heads).map(move |head| {
                    let start = (layer * heads + head) * size * size;
                    let matrix = &weights[start..start + size * size];
                    matrix.chunks(size).map(<[f32]>::to_vec).collect::<Vec<_>>()
                })
            });
            let layers = nested_elements(layers);
            object_response(&models, &body, "weights", layers, memory, computed)
        }
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
    let own = model.clone();
    let count = move |inputs: &[Inputs]| {
        let tokenizer = own.tokenizer();
        let count = |(text, pair): &Inputs| {
            let tokens = match pair {
                None => tokenizer.encode(&[text])?,
                Some(pair) => tokenizer.encode_pairs(&[(text, pair)])?,
            };
            Ok(tokens[0].input_ids.len())
        };
        inputs.iter().map(count).collect()
    };
    let inputs = Arc::new(vec![inputs]);
    let counts = models.tokenize(model.tokenizer(), inputs, 0, text_name, count).await?;
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
        let heads = attention.weights.dim(1).map_err(encoder::Error::from)?;
        let weights = attention.weights.flatten_all().and_then(|weights| weights.to_vec1());
        let weights = weights.map_err(encoder::Error::from)?;
        return Ok(Drawn::Weights { tokens: attention.queries, weights, heads });
    }
    let svg = document(title, &attention, &chosen).map_err(invalid)?;
    Ok(Drawn::Picture(if format == Format::Html { html_page(title, &svg) } else { svg }))
}
