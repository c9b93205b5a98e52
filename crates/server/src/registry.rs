//! The loaded models by name.

use std::{
    any::Any,
    collections::BTreeSet,
    sync::{Arc, PoisonError, RwLock},
};

use crate::{
    Model,
    failure::{Failure, Kind},
    request_model::note_model,
};

/// Models by name. The first is the default.
pub type NamedModels = Vec<(String, Arc<Model>)>;

/// The model called `name`.
pub fn find_named<'a>(models: &'a NamedModels, name: &str) -> Option<&'a (String, Arc<Model>)> {
    models.iter().find(|(known, _)| known == name)
}

/// The loaded models of a server.
#[derive(Default)]
pub struct Registry {
    /// `None` until the models are loaded.
    models: RwLock<Option<Arc<NamedModels>>>,
}

/// A model of the registry, with the pipeline of its task.
pub struct TaskModel<P> {
    pub name: String,
    pub model: Arc<Model>,
    pub pipeline: Arc<P>,
}

impl Registry {
    /// Replaces all models. Requests in progress keep the models that they began with.
    pub fn replace(&self, models: NamedModels) {
        let models = (!models.is_empty()).then(|| Arc::new(models));
        *self.models.write().unwrap_or_else(PoisonError::into_inner) = models;
    }

    /// All models.
    ///
    /// # Errors
    /// [`Kind::Unavailable`] if they are not loaded.
    pub fn all(&self) -> Result<Arc<NamedModels>, Failure> {
        let models = self.models.read().unwrap_or_else(PoisonError::into_inner);
        models.clone().ok_or_else(|| Failure::unavailable("the models are not loaded yet"))
    }

    /// The model called `name`, or the default if `name` is `None`.
    ///
    /// # Errors
    /// [`Kind::UnknownModel`] if no model has this name; the error of [`Self::all`].
    pub fn get(&self, name: Option<&str>) -> Result<(String, Arc<Model>), Failure> {
        let all = self.all()?;
        let found = match name {
            None => all.first(),
            Some(name) => find_named(&all, name),
        };
        found.cloned().inspect(|(name, _)| note_model(name)).ok_or_else(|| {
            let known: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
            let message = format!(
                "model {:?} is unknown: expected one of {known:?}",
                name.unwrap_or_default()
            );
            Failure::new(Kind::UnknownModel, message).with_field("model")
        })
    }

    /// `name`, or `None` if there is only one model. Clients of OpenAI and Cohere always send a
    /// name; like text-embeddings-inference and llama.cpp, a server with one model ignores it.
    ///
    /// # Errors
    /// The error of [`Self::all`].
    pub fn name_unless_single<'a>(
        &self,
        name: Option<&'a str>,
    ) -> Result<Option<&'a str>, Failure> {
        let is_single = self.all()?.len() == 1;
        Ok(name.filter(|_| !is_single))
    }

    /// The model called `name`, or the first model for a task if `name` is `None`. The pipeline of
    /// the task has the type `P`, and fulfils the condition.
    ///
    /// # Errors
    /// [`Kind::Backend`] if the named model has another task, or if `name` is `None` and no model
    /// has the task; the errors of [`Self::get`].
    pub fn find<P: Any + Send + Sync>(
        &self,
        name: Option<&str>,
        task: &str,
        condition: impl Fn(&P) -> bool,
    ) -> Result<TaskModel<P>, Failure> {
        let with_pipeline = |(name, model): (String, Arc<Model>)| {
            let pipeline = model.task().pipeline().filter(|pipeline| condition(pipeline))?;
            note_model(&name);
            Some(TaskModel { name, model, pipeline })
        };
        let all = self.all()?;
        match name {
            None => all.iter().cloned().find_map(with_pipeline).ok_or_else(|| {
                let found = all.iter().map(|(_, model)| model.task().described());
                let found: Vec<String> = found.collect::<BTreeSet<_>>().into_iter().collect();
                let message = format!(
                    "this server has no model for {task}: its models are for {}; GET /info lists \
                     them",
                    found.join(", ")
                );
                Failure::new(Kind::Backend, message)
            }),
            Some(_) => {
                let (name, model) = self.get(name)?;
                let own = model.task().described();
                let message = format!("model {name:?} is for {own}: expected a model for {task}");
                with_pipeline((name, model))
                    .ok_or_else(|| Failure::new(Kind::Backend, message).with_field("model"))
            }
        }
    }
}
