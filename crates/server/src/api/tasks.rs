//! The routes of tasks, such as `/tag`: the responses are the objects that the commands print.

use std::{fmt, marker::PhantomData, sync::Arc};

use axum::{extract::State, response::Response, routing::post};
use encoder::{
    Parameter, ParameterKind, Params, Pipeline, TaskVisitor, TextResult, TokenizedText,
    for_each_task,
};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, MapAccess, Visitor},
};
use serde_json::{Map, Value, json};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        ArrayBuilder, ContentBuilder, HttpMethod, ObjectBuilder, PathItem, PathsBuilder, Ref,
        RefOr, Required, ResponseBuilder, ResponsesBuilder, Schema, Type,
        path::OperationBuilder,
        request_body::RequestBodyBuilder,
        schema::{AdditionalProperties, SchemaType},
    },
};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use super::{
    checks::{check_count, check_response, check_size, text_name},
    embedding::{Outputs, Texts, compute},
    replies::{list_response, with_truncated},
};
use crate::{
    app::App,
    engine::Sequence,
    failure::{Failure, TeiFailures},
    input::Input,
    responses::RequestStats,
    sending::elements,
};

/// Maximum value of a parameter that is a number, such as the number of answers per text.
const MAX_COUNT: usize = 1000;

/// Adds the route of each task.
pub fn add_routes(router: OpenApiRouter<Arc<App>>) -> OpenApiRouter<Arc<App>> {
    struct Routes(OpenApiRouter<Arc<App>>);

    impl TaskVisitor for Routes {
        fn visit<P: Pipeline>(&mut self) {
            self.0 = std::mem::take(&mut self.0).routes(route::<P>());
        }
    }

    let mut routes = Routes(router);
    for_each_task(&mut routes);
    routes.0
}

/// The request of a task.
struct Request<P> {
    model: Option<String>,
    inputs: Texts,
    /// The values of parameters by name.
    values: Map<String, Value>,
    pipeline: PhantomData<P>,
}

/// The parameters of a request, and the number of bytes of those that are texts.
///
/// # Errors
/// [`Kind::Invalid`](crate::failure::Kind) for a number that is 0 or more than [`MAX_COUNT`]; the
/// errors of [`check_size`] for a text.
fn parameters<P: Pipeline>(values: Map<String, Value>) -> Result<(P::Params, usize), Failure> {
    let mut bytes = 0;
    for (name, value) in &values {
        if let Some(text) = value.as_str() {
            check_size(name, text)?;
            bytes += text.len();
        }
        if let Some(count) = value.as_u64()
            && !(1..=MAX_COUNT as u64).contains(&count)
        {
            let message = format!("{name} is {count}: expected 1 to {MAX_COUNT}");
            return Err(Failure::invalid(name, message));
        }
    }
    Ok((P::Params::from_values(values)?, bytes))
}

async fn run<P: Pipeline>(
    State(app): State<Arc<App>>,
    request: Input<Request<P>>,
) -> Result<Response, Failure> {
    let Request { model, inputs, values, .. } = request.value;
    let (params, param_bytes) = parameters::<P>(values)?;
    let found = app.registry.find(model.as_deref(), P::TASK, |_: &P| true)?;
    let texts = inputs.into_vec();
    check_count(&app.limits, texts.len(), "inputs")?;
    if P::SPLITS_TEXTS {
        texts.iter().enumerate().try_for_each(|(i, text)| check_size(&text_name(i), text))?;
    }
    let texts: Arc<Vec<(usize, String)>> = Arc::new(texts.into_iter().enumerate().collect());
    let pipeline = found.pipeline;
    let params = Arc::new(params);
    let tokenizer = pipeline.tokenizer();
    let pool = &app.tokenizer_pool;
    // The texts may be tokenized twice, because the memory for their windows is known only after
    // their tokens are counted.
    let size = {
        let (pipeline, params) = (pipeline.clone(), params.clone());
        move |texts: &[(usize, String)]| {
            let size_of_text = |(index, text): &(usize, String)| {
                with_text_name(*index, pipeline.size(text, &params))
            };
            texts.iter().map(size_of_text).collect()
        }
    };
    let sizes = pool.tokenize(tokenizer, texts.clone(), param_bytes, text_name, size).await?;
    check_response(sizes.iter().map(|size| size.values).sum(), "inputs")?;
    let bytes = sizes.iter().map(|size| size.bytes).sum();
    let memory = app.memory.reserve(bytes, "inputs").await?.with_body(request.bytes);
    let tokenize = {
        let (pipeline, params) = (pipeline.clone(), params.clone());
        move |texts: &[(usize, String)]| {
            let inputs: Vec<&str> = texts.iter().map(|(_, text)| text.as_str()).collect();
            let results = pipeline.tokenize_all(&inputs, &params).into_iter();
            results.zip(texts).map(|(result, (index, _))| with_text_name(*index, result)).collect()
        }
    };
    let tokenized: Vec<TokenizedText<P::Context>> =
        pool.tokenize(tokenizer, texts.clone(), param_bytes, text_name, tokenize).await?;

    let mut sequences: Vec<Sequence> = vec![];
    let split = |text: TokenizedText<P::Context>| {
        let count = text.sequences.len();
        sequences.extend(text.sequences.into_iter().map(|tokens| Sequence { tokens, prompt: 0 }));
        (count, text.context)
    };
    let contexts: Vec<(usize, P::Context)> = tokenized.into_iter().map(split).collect();
    let target = found.model.values(pipeline.clone(), params.clone());
    let Outputs { values, tokens, truncated, memory } =
        compute(&app.engine, target, sequences, memory).await?;
    let finish = move || {
        let mut values = values.into_iter();
        let texts = Arc::unwrap_or_clone(texts).into_iter();
        let finish_text = |((index, text), (count, context)): ((usize, String), (usize, _))| {
            let values_of_text = values.by_ref().take(count).collect();
            let result = pipeline.finish(&text, context, values_of_text, &params);
            Ok(TextResult { result: with_text_name(index, result)?, text })
        };
        let results: Result<Vec<_>, Failure> = texts.zip(contexts).map(finish_text).collect();
        Ok::<_, Failure>((results?, memory))
    };
    let (results, memory) = pool.run(finish).await??;
    let stats = RequestStats { model: found.name, texts: results.len(), tokens };
    let response = list_response(&app.metrics, elements(results.into_iter()), memory, stats);
    Ok(with_truncated(response, truncated))
}

/// A result for the text at an index. The message of a failure names the text.
fn with_text_name<T>(index: usize, result: encoder::Result<T>) -> Result<T, Failure> {
    result.map_err(|error| Failure::from(error).with_name(&text_name(index)))
}

impl<'de, P: Pipeline> Deserialize<'de> for Request<P> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_struct("Request", P::Params::FIELDS, RequestVisitor(PhantomData))
    }
}

struct RequestVisitor<P>(PhantomData<P>);

impl<'de, P: Pipeline> Visitor<'de> for RequestVisitor<P> {
    type Value = Request<P>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Request<P>, M::Error> {
        let mut model = None;
        let mut inputs = None;
        let mut values = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            let parameter = P::Params::PARAMETERS.iter().find(|known| known.name == name);
            match (parameter, name.as_str()) {
                (Some(parameter), _) => {
                    let value = map.next_value_seed(ParameterValue(parameter))?;
                    if !value.is_null() {
                        values.insert(name, value);
                    }
                }
                (None, "model") => model = map.next_value()?,
                (None, _) => inputs = Some(map.next_value()?),
            }
        }
        let inputs = inputs.ok_or_else(|| M::Error::missing_field("inputs"))?;
        let is_missing =
            |known: &&Parameter| known.kind.default().is_none() && !values.contains_key(known.name);
        if let Some(missing) = P::Params::PARAMETERS.iter().find(is_missing) {
            return Err(M::Error::missing_field(missing.name));
        }
        Ok(Request { model, inputs, values, pipeline: PhantomData })
    }
}

/// Reads the value of a parameter; null if the field has no value.
struct ParameterValue<'a>(&'a Parameter);

impl<'de> DeserializeSeed<'de> for ParameterValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<Value, D::Error> {
        match self.0.kind {
            ParameterKind::Text => Ok(String::deserialize(value)?.into()),
            ParameterKind::Count { .. } => Ok(Option::<usize>::deserialize(value)?.into()),
            ParameterKind::Choice { values, .. } => {
                let names = values().into_iter().map(|(name, _)| name).collect();
                value.deserialize_option(ChoiceVisitor { names })
            }
        }
    }
}

/// Reads one of the names, or null.
struct ChoiceVisitor {
    names: Vec<&'static str>,
}

impl<'de> Visitor<'de> for ChoiceVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "one of `{}`", self.names.join("`, `"))
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, value: D) -> Result<Value, D::Error> {
        value.deserialize_any(self)
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Value, E> {
        if self.names.contains(&name) {
            return Ok(name.into());
        }
        let expected = self.names.join("`, `");
        Err(E::custom(format!("unknown variant `{name}`, expected one of `{expected}`")))
    }
}

/// The route of a task, with its entry in the OpenAPI document.
fn route<P: Pipeline>() -> UtoipaMethodRouter<Arc<App>> {
    let mut schemas = vec![(request_name::<P>(), request_schema::<P>())];
    type Output<P> = TextResult<<P as Pipeline>::Output>;
    Output::<P>::schemas(&mut schemas);
    schemas.push((Output::<P>::name().into_owned(), Output::<P>::schema()));
    Texts::schemas(&mut schemas);
    schemas.push((Texts::name().into_owned(), Texts::schema()));

    let mut example = json!({ "inputs": P::EXAMPLE.text });
    for (name, value) in P::EXAMPLE.parameters {
        example[name] = value.parse::<usize>().map_or_else(|_| (*value).into(), Value::from);
    }
    let body = ContentBuilder::new()
        .schema(Some(Ref::from_schema_name(request_name::<P>())))
        .example(Some(example));
    let request = RequestBodyBuilder::new().content("application/json", body.build());
    let list = ArrayBuilder::new().items(Ref::from_schema_name(Output::<P>::name()));
    let response = ResponseBuilder::new()
        .description("the response")
        .content("application/json", ContentBuilder::new().schema(Some(list)).build());
    let responses = ResponsesBuilder::new()
        .responses_from_into_responses::<TeiFailures>()
        .response("200", response);
    let route = P::COMMAND.replace('-', "_");
    let operation = OperationBuilder::new()
        .tag("Tasks")
        .summary(Some(format!("{}, as `encodle {}`", P::ABOUT, P::COMMAND)))
        .operation_id(Some(route.clone()))
        .request_body(Some(request.required(Some(Required::True)).build()))
        .responses(responses.build());
    let paths = PathsBuilder::new()
        .path(format!("/{route}"), PathItem::new(HttpMethod::Post, operation.build()));
    (schemas, paths.build(), post(run::<P>))
}

fn request_name<P: Pipeline>() -> String {
    let words = P::COMMAND.split('-').map(|word| word[..1].to_uppercase() + &word[1..]);
    words.collect::<String>() + "Request"
}

fn request_schema<P: Pipeline>() -> RefOr<Schema> {
    let help = format!("Name of the model [default: the first model for {}]", P::TASK);
    let or_null = |kind: Type| -> SchemaType { [kind, Type::Null].into_iter().collect() };
    let model = ObjectBuilder::new().schema_type(or_null(Type::String)).description(Some(help));
    let mut object = ObjectBuilder::new()
        .property("model", model)
        .property("inputs", Ref::from_schema_name(Texts::name()))
        .required("inputs");
    for parameter in P::Params::PARAMETERS {
        let value = match parameter.kind {
            ParameterKind::Text => ObjectBuilder::new().schema_type(Type::String),
            ParameterKind::Count { .. } => ObjectBuilder::new()
                .schema_type(or_null(Type::Integer))
                .minimum(Some(1))
                .maximum(Some(MAX_COUNT)),
            ParameterKind::Choice { values, .. } => {
                let names = values().into_iter().map(|(name, _)| Value::from(name));
                ObjectBuilder::new()
                    .schema_type(or_null(Type::String))
                    .enum_values(Some(names.chain([Value::Null])))
            }
        };
        let default = parameter.kind.default();
        let shown = default.as_ref().map(|default| match default {
            Value::String(name) => name.clone(),
            other => other.to_string(),
        });
        let mut help = parameter.help().to_string();
        match shown {
            Some(default) => help += &format!(" [default: {default}]"),
            None => object = object.required(parameter.name),
        }
        if let ParameterKind::Choice { values, .. } = parameter.kind {
            for (name, meaning) in values() {
                help += &format!("\n- `{name}`: {meaning}");
            }
        }
        object = object.property(parameter.name, value.description(Some(help)));
    }
    object.additional_properties(Some(AdditionalProperties::FreeForm(false))).into()
}
