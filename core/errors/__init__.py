"""The exception tree. It holds no logic: who raises what, and when, is written where it is raised.

OarlockError
├── RequestError (ValueError)            a request is refused before any state changes
│   ├── EmptyPrompt, TokenOutOfRange, PromptTooLong, NoTokenizer, NoChatTemplate
│   ├── InvalidParameter                 ── InvalidMaxTokens, InvalidTemperature, InvalidTopP
│   ├── UnknownRequestKey                a field that no request has
│   ├── InvalidConstraint                a constraint that cannot be compiled
│   └── UnsupportedFeature               a field that needs a plugin which is not bound
├── AdmissionError (RuntimeError)        ── QueueFull, NeverFits
├── EngineClosed (RuntimeError)
├── WrongThread, StepInsideStep (RuntimeError)
├── RowError (RuntimeError)              one row failed; its neighbours go on ── NonFiniteLogits, ConstraintFailed,
│                                            SlowConsumer
├── CompositionError (RuntimeError)      a group fails together though no row fails alone
├── RecoveriesExhausted (RuntimeError)   the device fails again and again though no row is guilty
├── RankLost, ScheduleDiverged (RuntimeError)   one of several processes is gone, or did something else
├── LoadError                            ── ModelNotFound, NoModelConfig, NotGGUF, UnsupportedModel, MissingPackage
├── BindError (ValueError)               ── UnsupportedLayer, LayoutRefused, ModelNotBatchable, AdapterRefused,
│                                            MixedRefused, CompiledRefused, ProposerRefused
├── ConfigError (ValueError)             ── UnknownConfigKey, InvalidConfigValue, UnreadableConfig
└── PluginError                          ── BrokenPlugin, DuplicateName, UnknownName, UnknownHook,
                                            ApiMismatch, RequirementUnmet, RegistryFrozen, DisabledPlugin, InvalidPlugin
"""

from oarlock.core.errors.base import OarlockError, did_you_mean
from oarlock.core.errors.binding import (
    AdapterRefused,
    BindError,
    CompiledRefused,
    ConfigError,
    InvalidConfigValue,
    LayoutRefused,
    LoadError,
    MissingPackage,
    MixedRefused,
    ModelNotBatchable,
    ModelNotFound,
    NoModelConfig,
    NotGGUF,
    ProposerRefused,
    UnknownConfigKey,
    UnreadableConfig,
    UnsupportedLayer,
    UnsupportedModel,
)
from oarlock.core.errors.plugins import (
    ApiMismatch,
    BrokenPlugin,
    DisabledPlugin,
    DuplicateName,
    InvalidPlugin,
    PluginError,
    RegistryFrozen,
    RequirementUnmet,
    UnknownHook,
    UnknownName,
)
from oarlock.core.errors.requests import (
    EmptyPrompt,
    InvalidConstraint,
    InvalidMaxTokens,
    InvalidParameter,
    InvalidTemperature,
    InvalidTopP,
    NoChatTemplate,
    NoTokenizer,
    PromptTooLong,
    RequestError,
    TokenOutOfRange,
    UnknownRequestKey,
    UnsupportedFeature,
)
from oarlock.core.errors.running import (
    AdmissionError,
    CompositionError,
    ConstraintFailed,
    EngineClosed,
    NeverFits,
    NonFiniteLogits,
    QueueFull,
    RankLost,
    RecoveriesExhausted,
    RowError,
    ScheduleDiverged,
    SlowConsumer,
    StepInsideStep,
    WrongThread,
)

__all__ = [
    "AdapterRefused",
    "AdmissionError",
    "ApiMismatch",
    "BindError",
    "BrokenPlugin",
    "CompiledRefused",
    "CompositionError",
    "ConfigError",
    "ConstraintFailed",
    "DisabledPlugin",
    "DuplicateName",
    "EmptyPrompt",
    "EngineClosed",
    "InvalidConfigValue",
    "InvalidConstraint",
    "InvalidMaxTokens",
    "InvalidParameter",
    "InvalidPlugin",
    "InvalidTemperature",
    "InvalidTopP",
    "LayoutRefused",
    "LoadError",
    "MissingPackage",
    "MixedRefused",
    "ModelNotBatchable",
    "ModelNotFound",
    "NeverFits",
    "NoChatTemplate",
    "NoModelConfig",
    "NoTokenizer",
    "NonFiniteLogits",
    "NotGGUF",
    "OarlockError",
    "PluginError",
    "PromptTooLong",
    "ProposerRefused",
    "QueueFull",
    "RankLost",
    "RecoveriesExhausted",
    "RegistryFrozen",
    "RequestError",
    "RequirementUnmet",
    "RowError",
    "ScheduleDiverged",
    "SlowConsumer",
    "StepInsideStep",
    "TokenOutOfRange",
    "UnknownConfigKey",
    "UnknownHook",
    "UnknownName",
    "UnknownRequestKey",
    "UnreadableConfig",
    "UnsupportedFeature",
    "UnsupportedLayer",
    "UnsupportedModel",
    "WrongThread",
    "did_you_mean",
]
