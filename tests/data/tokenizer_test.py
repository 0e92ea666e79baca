"""Tokenizers: lossless, blind to marks in a text, and clear when unusable."""

import io
import os

import numpy as np
from absl.testing import absltest, parameterized

from hybrid_moe.checks import ConfigError
from hybrid_moe.data import tokenizer as tokenizer_lib

_TEXT = 'def f(x):\n\treturn x  # naïve – 漢字 🙂\n'


def _train_bpe(path: str, specials: list[str]) -> None:
  import tokenizers

  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  model.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=specials,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  model.train_from_iterator([_TEXT * 5], trainer)
  # Settings that must not reach a corpus.
  model.enable_truncation(4)
  model.enable_padding(length=64)
  model.save(path)


def _train_sentencepiece(path: str) -> None:
  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['the quick brown fox jumps over the dog'] * 20),
    model_writer=model,
    vocab_size=300,
    byte_fallback=True,
    model_type='bpe',
    normalization_rule_name='identity',
    remove_extra_whitespaces=False,
    add_dummy_prefix=False,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  with open(path, 'wb') as file:
    file.write(model.getvalue())


class TokenizerTest(parameterized.TestCase):
  def _trained(self, kind: str) -> str:
    folder = self.create_tempdir().full_path
    if kind == 'bpe':
      path = os.path.join(folder, 'tokenizer.json')
      _train_bpe(path, ['<pad>', '<s>', '</s>'])
    else:
      path = os.path.join(folder, 'text.model')
      _train_sentencepiece(path)
    return path

  @parameterized.parameters('byte', 'bpe', 'sentencepiece')
  def test_decodes_what_it_encodes(self, kind):
    name = kind if kind == 'byte' else self._trained(kind)
    tokenizer = tokenizer_lib.load_tokenizer(name)
    text = _TEXT if kind != 'sentencepiece' else 'the fox – 漢字 🙂'
    ids = tokenizer.encode(text)
    self.assertEqual(ids.dtype, np.int32)
    self.assertEqual(tokenizer.decode(ids), text)
    np.testing.assert_array_equal(ids, tokenizer.encode(text.encode()))
    self.assertLess(ids.max(), tokenizer.vocab_size)
    # A model's padded vocabulary can sample ids that no tokenizer has.
    marked = [
      tokenizer.bos_id,
      *ids,
      tokenizer.eos_id,
      tokenizer.vocab_size,
      -1,
    ]
    self.assertEqual(tokenizer.decode(np.asarray(marked)), text)

  def test_byte_ids_leave_room_in_the_default_vocabulary(self):
    tokenizer = tokenizer_lib.ByteTokenizer()
    marks = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id}
    self.assertLen(marks, 3)
    self.assertEqual(min(marks), 256)
    self.assertLess(max(marks), tokenizer.vocab_size)
    self.assertLessEqual(tokenizer.vocab_size, 272)

  def test_cut_characters_decode_to_replacements(self):
    tokenizer = tokenizer_lib.ByteTokenizer()
    self.assertEqual(tokenizer.decode(tokenizer.encode('漢')[:2]), '\ufffd')

  def test_mark_names_in_a_text_are_text(self):
    tokenizer = tokenizer_lib.load_tokenizer(self._trained('bpe'))
    ids = tokenizer.encode('a</s>b')
    self.assertNotIn(tokenizer.eos_id, ids.tolist())
    self.assertEqual(tokenizer.decode(ids), 'a</s>b')

  def test_identity_follows_the_content_of_the_file(self):
    path = self._trained('bpe')
    before = tokenizer_lib.load_tokenizer(path).identity
    self.assertEqual(tokenizer_lib.load_tokenizer(path).identity, before)
    _train_bpe(path, ['<pad>', '<s>', '</s>', '<extra>'])
    self.assertNotEqual(tokenizer_lib.load_tokenizer(path).identity, before)

  @parameterized.parameters('x.json', 'x.model')
  def test_missing_file(self, name):
    with self.assertRaisesRegex(ConfigError, f'{name}.*no such file'):
      tokenizer_lib.load_tokenizer(name)

  @parameterized.parameters('x.json', 'x.model')
  def test_unreadable_content(self, name):
    path = self.create_tempfile(name, 'neither of them').full_path
    with self.assertRaisesRegex(ConfigError, f'data.tokenizer=.*{name}'):
      tokenizer_lib.load_tokenizer(path)

  def test_a_folder_is_not_a_file(self):
    path = os.path.join(self.create_tempdir().full_path, 'x.json')
    os.mkdir(path)
    with self.assertRaisesRegex(ConfigError, 'readable file'):
      tokenizer_lib.load_tokenizer(path)

  def test_unknown_kind(self):
    with self.assertRaisesRegex(ConfigError, "'bytes'.*'byte' or the path"):
      tokenizer_lib.load_tokenizer('bytes')

  def test_vocabulary_without_an_end_mark(self):
    path = os.path.join(self.create_tempdir().full_path, 'tokenizer.json')
    _train_bpe(path, ['<unk>'])
    with self.assertRaisesRegex(ConfigError, 'end-of-document'):
      tokenizer_lib.load_tokenizer(path)

  def test_vocabulary_larger_than_the_model(self):
    tokenizer = tokenizer_lib.ByteTokenizer()
    tokenizer_lib.check_vocabulary(tokenizer, 259)
    with self.assertRaisesRegex(ConfigError, 'vocab_size=258.*259.*byte'):
      tokenizer_lib.check_vocabulary(tokenizer, 258)


if __name__ == '__main__':
  absltest.main()
