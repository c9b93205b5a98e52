//! The description of a task for the command, the HTTP route and the Python class, each of which is
//! written once for all tasks.

use rayon::prelude::*;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value};

use crate::{
    Choice, EncoderModel, Error, InputError, LoadOptions, LoadReport, ModelFiles, Result,
    TextTokenizer, Tokens,
    models::ragged_batch::{TOKEN_BUDGET, within_budget},
    phrase,
    pipelines::distinct::Distinct,
};

/// A task: from texts to one result per text.
///
/// A result is computed in three steps, so that a server can compute the sequences of many requests
/// in one batch: [`Self::tokenize`] turns a text into sequences of tokens, [`Self::compute`]
/// computes the values of each sequence, and [`Self::finish`] makes the result from the values.
/// [`Self::run`] does all three.
///
/// # Examples
/// ```
/// use encoder::{LoadOptions, Pipeline, QuestionAnswerer, QuestionAnswererParams};
///
/// let dir = "../../tests/golden/heads/answer";
/// let model = QuestionAnswerer::from_dir(dir, &LoadOptions::default())?;
/// let params = QuestionAnswererParams { question: "bad".to_string(), top: 1 };
/// let results = model.run(&["a cab face x"], &params)?;
/// assert_eq!(results[0].answers[0].text, "a cab face");
/// # Ok::<(), encoder::Error>(())
/// ```
pub trait Pipeline: Clone + Send + Sync + Sized + 'static {
    /// The name of the task in the description of a server and in the Python package, such as
    /// `question_answering`.
    const TASK: &'static str;
    /// The name of the command and, with `_` for `-`, of the route, such as `answer`.
    const COMMAND: &'static str;
    /// The purpose of the command and the route, an imperative phrase.
    const ABOUT: &'static str;
    /// A call as an example: the arguments and the text.
    const EXAMPLE: Example;
    /// The types of the model, as [`Inspection`](crate::Inspection) lists them: those with a head.
    const MODELS: &'static [&'static str];
    /// Whether a text longer than the model's maximum length is read as a whole, as several
    /// sequences. Otherwise the text is truncated. A server limits the size of such texts.
    const SPLITS_TEXTS: bool;

    /// The parameters of a call, equal for all texts.
    type Params: Params;
    /// The part of a tokenized text that [`Self::finish`] needs beside its sequences.
    type Context: Send + 'static;
    /// The values of a sequence.
    type Values: Clone + Send + 'static;
    /// The result of a text.
    type Output: TaskOutput;

    /// Loads the model.
    ///
    /// # Errors
    /// The errors of the `from_files` of the type.
    fn load(files: &ModelFiles, options: &LoadOptions) -> Result<Self>;

    /// The tokenizer.
    fn tokenizer(&self) -> &TextTokenizer;

    /// The encoder below the head.
    fn encoder(&self) -> &EncoderModel;

    /// The report on the loaded checkpoint.
    fn report(&self) -> &LoadReport;

    /// The names of the labels, for a classifier.
    fn label_names(&self) -> &[String] {
        &[]
    }

    /// An upper bound of the size of a text's sequences, values and result.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize`].
    fn size(&self, text: &str, params: &Self::Params) -> Result<TaskSize>;

    /// Turns a text into sequences. If there are none, [`Self::compute`] is not called.
    ///
    /// # Errors
    /// The error of a text that the model does not accept.
    fn tokenize(&self, text: &str, params: &Self::Params) -> Result<TokenizedText<Self::Context>>;

    /// Computes the values of each sequence. The sequences may be those of several texts and of
    /// several calls for which [`Self::batch_key`] is equal.
    ///
    /// # Errors
    /// The errors of [`EncoderModel::forward_ragged`]; [`Error::NonFiniteOutput`] for values that
    /// are NaN or infinite.
    fn compute(&self, sequences: &[&Tokens], params: &Self::Params) -> Result<Vec<Self::Values>>;

    /// A number for the parameters that change the values of [`Self::compute`].
    fn batch_key(_params: &Self::Params) -> usize {
        0
    }

    /// Makes the result of a text from the values of its sequences.
    ///
    /// # Errors
    /// [`Error::NonFiniteOutput`] for values that are NaN or infinite.
    fn finish(
        &self,
        text: &str,
        context: Self::Context,
        values: Vec<Self::Values>,
        params: &Self::Params,
    ) -> Result<Self::Output>;

    /// The results of texts, in their order.
    ///
    /// # Errors
    /// The errors of [`Self::tokenize`], [`Self::compute`] and [`Self::finish`].
    fn run<S: AsRef<str> + Sync>(
        &self,
        texts: &[S],
        params: &Self::Params,
    ) -> Result<Vec<Self::Output>> {
        let tokenized = self.tokenize_all(texts, params).into_iter().collect::<Result<Vec<_>>>()?;
        self.run_tokenized(texts, tokenized, params, |batch| self.compute(batch, params))
    }

    /// [`Self::tokenize`] for each text, on the threads of rayon's pool.
    fn tokenize_all<S: AsRef<str> + Sync>(
        &self,
        texts: &[S],
        params: &Self::Params,
    ) -> Vec<Result<TokenizedText<Self::Context>>> {
        texts.par_iter().map(|text| self.tokenize(text.as_ref(), params)).collect()
    }

    /// The second and the third step of [`Self::run`]. `compute` is called for batches of at most
    /// 2,048 tokens, or one sequence. It can call [`Self::compute`] on another thread, or end the
    /// computation with an error.
    ///
    /// # Errors
    /// The errors of `compute` and [`Self::finish`].
    fn run_tokenized<S: AsRef<str>>(
        &self,
        texts: &[S],
        tokenized: Vec<TokenizedText<Self::Context>>,
        params: &Self::Params,
        mut compute: impl FnMut(&[&Tokens]) -> Result<Vec<Self::Values>>,
    ) -> Result<Vec<Self::Output>> {
        let sequences: Vec<&Tokens> = tokenized.iter().flat_map(|text| &text.sequences).collect();
        let mut values = in_parts(&sequences, &mut compute)?.into_iter();
        let finish = |(text, tokenized): (&S, TokenizedText<_>)| {
            let own = values.by_ref().take(tokenized.sequences.len()).collect();
            self.finish(text.as_ref(), tokenized.context, own, params)
        };
        std::iter::zip(texts, tokenized).map(finish).collect()
    }
}

/// A function over the types of tasks, for [`for_each_task`](crate::for_each_task).
pub trait TaskVisitor {
    /// Is called for one task.
    fn visit<P: Pipeline>(&mut self);
}

/// A text and its result: an object with the field `text` and the fields of the result.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TextResult<T> {
    /// The text.
    pub text: String,
    /// The result.
    #[serde(flatten)]
    pub result: T,
}

/// A tokenized text: its sequences, and what the last step of its task needs beside their values.
#[derive(Clone, Debug)]
pub struct TokenizedText<C> {
    /// The sequences, in the order of their values.
    pub sequences: Vec<Tokens>,
    /// The part that [`Pipeline::finish`] needs.
    pub context: C,
}

/// An upper bound of the size of a text's sequences, values and result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskSize {
    /// Bytes of the sequences, the values and the result.
    pub bytes: usize,
    /// Number of values of the result that do not depend on the number of tokens, which a server
    /// limits.
    pub values: usize,
}

/// A call of a task, for help texts and documentation.
#[derive(Clone, Copy, Debug)]
pub struct Example {
    /// The names and values of parameters.
    pub parameters: &'static [(&'static str, &'static str)],
    /// The text.
    pub text: &'static str,
}

/// The result of a text: serialised as an object.
#[cfg(not(feature = "openapi"))]
pub trait TaskOutput: Serialize + Send + 'static {}
#[cfg(not(feature = "openapi"))]
impl<T: Serialize + Send + 'static> TaskOutput for T {}

/// The result of a text: serialised as an object, which has a schema.
#[cfg(feature = "openapi")]
pub trait TaskOutput: Serialize + Send + utoipa::ToSchema + 'static {}
#[cfg(feature = "openapi")]
impl<T: Serialize + Send + utoipa::ToSchema + 'static> TaskOutput for T {}

/// Calls `compute` for successive parts of the distinct sequences, of at most 2,048 tokens or one
/// sequence, and returns the values of all. Only the hidden states of one part are in memory at a time.
///
/// # Errors
/// The error of the first part for which `compute` fails.
pub(crate) fn in_parts<T: Clone>(
    sequences: &[&Tokens],
    compute: &mut impl FnMut(&[&Tokens]) -> Result<Vec<T>>,
) -> Result<Vec<T>> {
    let distinct = Distinct::sequences(sequences);
    let sequences = &distinct.items;
    let lengths: Vec<usize> = sequences.iter().map(|tokens| tokens.input_ids.len()).collect();
    let order: Vec<usize> = (0..sequences.len()).collect();
    let mut values = Vec::with_capacity(sequences.len());
    for part in within_budget(&order, &lengths, TOKEN_BUDGET) {
        values.extend(compute(&sequences[part[0]..part[0] + part.len()])?);
    }
    Ok(distinct.expand(values))
}

/// The parameters of a task. The macro `parameters!` of this file declares the type.
pub trait Params: DeserializeOwned + Send + Sync + 'static {
    /// The parameters, in the order of help texts.
    const PARAMETERS: &'static [Parameter];
    /// The fields of a JSON object that calls the task: `model`, `inputs` (the texts) and the
    /// parameters.
    const FIELDS: &'static [&'static str];

    /// The parameters from their values by name; those that are absent have their defaults.
    ///
    /// # Errors
    /// [`InputError::UnknownChoice`] for a name that is not one of a choice;
    /// [`InputError::Parameter`] for a parameter without a value and a default, with a value of the
    /// wrong type, or that the task does not have.
    fn from_values(mut values: Map<String, Value>) -> Result<Self> {
        for parameter in Self::PARAMETERS {
            let name = parameter.name;
            if let (None, Some(default)) = (values.get(name), parameter.kind.default()) {
                values.insert(name.to_string(), default);
            }
            if let (ParameterKind::Choice { values: known, .. }, Some(Value::String(got))) =
                (parameter.kind, values.get(name))
            {
                let expected: Vec<_> = known().into_iter().map(|(name, _)| name).collect();
                if !expected.contains(&got.as_str()) {
                    let got = got.clone();
                    return Err(InputError::UnknownChoice { setting: name, got, expected }.into());
                }
            }
        }
        serde_json::from_value(Value::Object(values))
            .map_err(|error| Error::Input(InputError::Parameter(error)))
    }
}

/// A parameter of a task.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// The name.
    pub name: &'static str,
    pub(crate) documentation: &'static str,
    /// The type, with the default.
    pub kind: ParameterKind,
}

impl Parameter {
    /// The meaning of the parameter, a phrase without a full stop.
    pub fn help(self) -> &'static str {
        phrase(self.documentation)
    }
}

/// The type of a parameter, with the default.
#[derive(Clone, Copy, Debug)]
pub enum ParameterKind {
    /// A text, which every call gives.
    Text,
    /// A whole number of at least 1.
    Count {
        /// The default.
        default: usize,
    },
    /// The name of a value of a [`Choice`].
    Choice {
        /// The name and the help text of each value.
        values: fn() -> Vec<(&'static str, &'static str)>,
        /// The name of the default.
        default: fn() -> &'static str,
    },
}

impl ParameterKind {
    /// A choice with its default.
    pub const fn choice<T: Choice + Default>() -> Self {
        Self::Choice {
            values: || T::ALL.iter().map(|value| (value.name(), value.help())).collect(),
            default: || T::default().name(),
        }
    }

    /// The default; `None` for a parameter that every call gives.
    pub fn default(self) -> Option<Value> {
        match self {
            Self::Text => None,
            Self::Count { default } => Some(default.into()),
            Self::Choice { default, .. } => Some(default().into()),
        }
    }
}

/// Declares the parameters of a task: a struct that is [`Params`]. The documentation of a field is
/// its help text.
macro_rules! parameters {
    (
        $(#[$meta:meta])*
        pub struct $type:ident {
            $($(#[doc = $doc:literal])+ $field:ident: $field_type:ty = $kind:expr,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $type {
            $($(#[doc = $doc])+ pub $field: $field_type,)*
        }

        impl $crate::Params for $type {
            const PARAMETERS: &'static [$crate::Parameter] = &[$($crate::Parameter {
                name: stringify!($field),
                documentation: concat!($($doc),+),
                kind: $kind,
            },)*];
            const FIELDS: &'static [&'static str] = &["model", "inputs", $(stringify!($field)),*];
        }
    };
}
pub(crate) use parameters;
