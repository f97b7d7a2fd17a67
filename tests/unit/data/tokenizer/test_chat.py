"""Which text of a conversation the assistant wrote, under the kinds of templates that are about."""

import pytest

from meshwright.config.errors import RequestError
from meshwright.data.document import Piece
from meshwright.data.tokenizer.chat import ChatTemplate
from meshwright.data.tokenizer.tokenizer import ChatError

pytest.importorskip("jinja2")

CHATML = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}"""
NO_MARK = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NO_MARK += "{% if add_generation_prompt %}assistant: {% endif %}"
MARKED = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<A>' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}
    {%- else %}
        {{- '<U>' + m.content }}
    {%- endif %}
{%- endfor %}"""
FORGETS = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' and loop.last %}
        {{- '<A><think>' + m.reasoning + '</think>' + m.content + '<E>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<A>' + m.content + '<E>' }}
    {%- else %}
        {{- '<U>' + m.content + '<E>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<A>' }}{%- endif %}"""

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!", "reasoning": "greet"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye.", "reasoning": "part"},
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": "</s>"}, "a tokenizer")


def trained(piece: Piece) -> list[str]:
    return [part.text for part in piece.parts if part.trained]


def test_turns_with_their_marks_are_trained() -> None:
    (piece,) = template(CHATML).documents(TWO_TURNS)
    assert trained(piece) == ["Hello!<|im_end|>", "Bye.<|im_end|>"]
    assert piece.text == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TWO_TURNS)
    assert not piece.trains_end  # the turn has a mark of its own


def test_without_a_mark_the_line_end_and_the_end_are_what_stops() -> None:
    (piece,) = template(NO_MARK).documents(TWO_TURNS)
    assert trained(piece) == ["Hello!\n", "Bye.\n"]
    assert piece.trains_end


def test_templates_that_mark_their_text_are_taken_at_their_word() -> None:
    (piece,) = template(MARKED).documents(TWO_TURNS)
    assert trained(piece) == ["Hello!</s>", "Bye.</s>"]
    assert piece.text == "<U>Be brief.<U>Hi<A>Hello!</s><U>Bye<A>Bye.</s>"


def test_templates_that_forget_give_a_document_a_turn() -> None:
    first, second = template(FORGETS).documents(TWO_TURNS)
    assert trained(first) == ["<think>greet</think>Hello!<E>"]
    assert first.text.endswith("<think>greet</think>Hello!<E>")
    assert trained(second) == ["<think>part</think>Bye.<E>"]
    assert "greet" not in second.text


@pytest.mark.parametrize(
    ("source", "messages", "told"),
    [
        (CHATML, TWO_TURNS[:2], "no assistant's turn"),
        ("{{ raise_exception('no system message') }}", TWO_TURNS, "no system message"),
        ("{{ messages[9].content }}", TWO_TURNS, "refuses"),
        (
            "{% if add_generation_prompt %}x{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}",
            TWO_TURNS,
            "does not begin message 2",
        ),
        (MARKED, [{"role": "assistant", "content": "\uf8f1\uf8f0"}], "reserved"),
    ],
)
def test_conversations_that_cannot_be_split_are_told(source: str, messages: list, told: str) -> None:
    with pytest.raises(ChatError, match=told):
        template(source).documents(messages)


def test_a_broken_template_is_the_users_mistake() -> None:
    with pytest.raises(RequestError, match="no valid Jinja"):
        template("{% for %}")


def test_templates_run_in_a_sandbox() -> None:
    """B68 (Megatron-Bridge#3506): a template is data from elsewhere."""
    with pytest.raises(ChatError):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").documents(TWO_TURNS)
