//! The attention weights of a text, as the command `encodle attention` shows them.

use std::sync::Arc;

use axum::{
    extract::State,
    http::{HeaderValue, header},
    response::{Html, IntoResponse, Response},
};
use encoder::TextAttention;
use picture::{HeadChoice, choose, document, html_page};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    checks::{check_response, check_size, text_name},
    fields::optional_choice,
    nested::Scalar,
    replies::{object_response, with_stats},
};
use crate::{
    app::App,
    failure::{Failure, Kind, TeiFailures},
    input::Input,
    model::Model,
    responses::RequestStats,
    sending::nested_elements,
    tokenizer_pool::TokenizerPool,
};

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
enum Rendering {
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
    State(app): State<Arc<App>>,
    request: Input<AttentionRequest>,
) -> Result<Response, Failure> {
    let AttentionRequest { model, inputs, pair, layer, head, format } = request.value;
    let format = format.unwrap_or_default();
    let (name, model) = app.registry.get(model.as_deref())?;
    let head = match head {
        None => HeadChoice::Mean,
        Some(Head::Number(number)) => HeadChoice::One(number),
        Some(Head::Name(name)) => name.parse().map_err(|expected| {
            Failure::invalid("head", format!("head {name:?} is unknown: {expected}"))
        })?,
    };
    check_size("inputs", &inputs)?;
    pair.iter().try_for_each(|pair| check_size("pair", pair))?;
    let tokens = count_tokens(&app.tokenizer_pool, &model, &inputs, pair.as_deref()).await?;
    let config = model.task().encoder()?.config();
    let heads = config.num_hidden_layers * config.num_attention_heads;
    check_response(heads * tokens.pow(2), "inputs")?;
    // The weights of each layer, and of all together.
    let memory = app.memory.reserve(2 * 4 * heads * tokens.pow(2), "inputs").await?;
    let reader = model.clone();
    let title = match &pair {
        None => inputs.clone(),
        Some(pair) => format!("{inputs} / {pair}"),
    };
    // A model of the server is an encoder, which has one kind of attention.
    let read =
        move |text: String| Ok(reader.attention()?.read(&text, pair.as_deref())?.swap_remove(0));
    let mut results = app.engine.map(model.number(), vec![(tokens, inputs)], read).await?;
    let attention = results.swap_remove(0);
    let stats = RequestStats { model: name, texts: 1, tokens };
    let rendering = app.tokenizer_pool.run(move || draw(attention, &title, layer, head, format));
    Ok(match rendering.await?? {
        Rendering::Weights { tokens, weights, heads } => {
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
            let elements = nested_elements(layers);
            object_response(&app.metrics, &body, "weights", elements, memory, stats)
        }
        Rendering::Picture(html) if format == Format::Html => {
            with_stats(&app.metrics, Html(html).into_response(), stats)
        }
        Rendering::Picture(svg) => {
            let svg_type = HeaderValue::from_static("image/svg+xml");
            let response = ([(header::CONTENT_TYPE, svg_type)], svg).into_response();
            with_stats(&app.metrics, response, stats)
        }
    })
}

/// The number of tokens of a text or of a pair.
async fn count_tokens(
    pool: &TokenizerPool,
    model: &Arc<Model>,
    text: &str,
    pair: Option<&str>,
) -> Result<usize, Failure> {
    type Inputs = (String, Option<String>);
    let inputs: Vec<Inputs> = vec![(text.to_string(), pair.map(str::to_string))];
    let owned_model = model.clone();
    let count = move |inputs: &[Inputs]| {
        let tokenizer = owned_model.tokenizer();
        let count = |(text, pair): &Inputs| {
            let tokens = match pair {
                None => tokenizer.encode(&[text])?,
                Some(pair) => tokenizer.encode_pairs(&[(text, pair)])?,
            };
            Ok(tokens[0].input_ids.len())
        };
        inputs.iter().map(count).collect()
    };
    let counts = pool.tokenize(model.tokenizer(), Arc::new(inputs), 0, text_name, count).await?;
    Ok(counts[0])
}

fn draw(
    attention: TextAttention,
    title: &str,
    layer: Option<usize>,
    head: HeadChoice,
    format: Format,
) -> Result<Rendering, Failure> {
    let invalid = |error: picture::Error| Failure::new(Kind::Invalid, error);
    // This checks `layer` and `head`, also if the response is JSON, which does not use them.
    let chosen = choose(&attention, layer, head).map_err(invalid)?;
    if format == Format::Json {
        let heads = attention.weights.dim(1).map_err(encoder::Error::from)?;
        let flat = attention.weights.flatten_all().and_then(|weights| weights.to_vec1());
        let weights = flat.map_err(encoder::Error::from)?;
        return Ok(Rendering::Weights { tokens: attention.queries, weights, heads });
    }
    let svg = document(title, &attention, &chosen).map_err(invalid)?;
    Ok(Rendering::Picture(if format == Format::Html { html_page(title, &svg) } else { svg }))
}
