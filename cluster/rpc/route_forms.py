"""The forms of all routes that have one, by the name of their operation."""

from collections.abc import Mapping
from typing import Final

from cluster.rpc import message_forms, series_forms, timer_forms
from cluster.rpc.http_form import HttpForm

FORMS: Final[Mapping[str, HttpForm]] = {
    **timer_forms.FORMS,
    **series_forms.FORMS,
    **message_forms.FORMS,
}
