"""Documents of folders, prepared datasets and generators."""

import dataclasses
import os

import numpy as np
import tensorflow_datasets as tfds
from absl.testing import absltest, parameterized

from hybrid_moe.checks import ConfigError
from hybrid_moe.data import cache, synthetic
from hybrid_moe.data.source import open_source
from hybrid_moe.data.tokenizer import ByteTokenizer
from hybrid_moe.data_config import DataConfig, SourceConfig

_TEXTS = ('first text', 'second text – ü', 'third')


class SmallTexts(tfds.core.GeneratorBasedBuilder):
  """Three documents as text and as ids."""

  VERSION = tfds.core.Version('1.2.0')

  def _info(self):
    features = {
      'text': tfds.features.Text(),
      'ids': tfds.features.Tensor(shape=(None,), dtype=np.int32),
      'score': np.float32,
    }
    return tfds.core.DatasetInfo(
      builder=self,
      description='Texts.',
      features=tfds.features.FeaturesDict(features),
    )

  def _split_generators(self, dl_manager):
    return {
      'train': self._generate_examples(0),
      'test': self._generate_examples(100),
    }

  def _generate_examples(self, first):
    for i, text in enumerate(_TEXTS):
      ids = np.full(i + 2, first + 100 * i, np.int32)
      yield i, {'text': text, 'ids': ids, 'score': 0.5}


def _prepare(folder: str) -> None:
  builder = SmallTexts(data_dir=folder, file_format='array_record')
  builder.download_and_prepare()


class SourceTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = self.create_tempdir().full_path
    self.tokenizer = ByteTokenizer()

  def _open(self, split='train', seq_len=128, seed=0, **fields):
    config = SourceConfig(name='mine', **fields)
    return open_source(
      config,
      split,
      tokenizer=self.tokenizer,
      data=DataConfig(sources=(config,), tfds_dir=self.folder, seed=seed),
      data_dir=self.folder,
      seq_len=seq_len,
    )

  def _tfds(self, **fields):
    fields = {'dataset': 'small_texts', 'validation_split': 'test', **fields}
    return self._open(kind='tfds', **fields)

  def _decode(self, source):
    texts = []
    for i in range(len(source)):
      tokens = source[i].tokens
      self.assertEqual(tokens.dtype, np.int32)
      self.assertEqual(tokens[0], self.tokenizer.bos_id)
      self.assertEqual(tokens[-1], self.tokenizer.eos_id)
      texts.append(self.tokenizer.decode(tokens))
    return texts

  def test_folder(self):
    root = self.create_tempdir()
    for i in range(6):
      root.create_file(f'{i}.txt', f'text {i}')
    fields = dict(path=root.full_path, patterns=('*.txt',))
    train = self._open('train', **fields)
    validation = self._open('validation', **fields)
    self.assertCountEqual(
      self._decode(train) + self._decode(validation),
      [f'text {i}' for i in range(6)],
    )
    self.assertNotEqual(train.identity, validation.identity)
    self.assertEqual(train[0].source, 'mine')
    self.assertRegex(train[0].path, '^[0-9].txt$')

  def test_prepared_dataset(self):
    _prepare(self.folder)
    train = self._tfds()
    self.assertCountEqual(self._decode(train), _TEXTS)
    self.assertIn('small_texts/1.2.0', train.identity)
    part = self._tfds(train_split='train[:2]')
    self.assertLen(part, 2)
    self.assertLen(
      {train.identity, part.identity, self._tfds(split='validation').identity},
      3,
    )

  def test_prepared_ids(self):
    _prepare(self.folder)
    source = self._tfds(text_field='ids')
    found = sorted(source[i].tokens.tolist() for i in range(3))
    bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
    self.assertEqual(
      found,
      [
        [bos, 0, 0, eos],
        [bos, 100, 100, 100, eos],
        [bos, 200, 200, 200, 200, eos],
      ],
    )

  def test_marks_that_ids_have_are_not_doubled(self):
    _prepare(self.folder)
    self.tokenizer.bos_id = self.tokenizer.eos_id = 100
    source = self._tfds(text_field='ids')
    self.assertIn([100] * 3, [source[i].tokens.tolist() for i in range(3)])

  def test_ids_beyond_the_vocabulary(self):
    _prepare(self.folder)
    source = self._tfds(split='validation', text_field='ids')
    with self.assertRaisesRegex(
      ConfigError, r"text_field='ids'.*holds ids 300 to 300.*\[0, 259\)"
    ):
      for i in range(3):
        source[i]

  def test_wrong_type_of_feature(self):
    _prepare(self.folder)
    with self.assertRaisesRegex(ConfigError, 'float.*accepted is text'):
      self._tfds(text_field='score')[0]

  def test_missing_feature(self):
    _prepare(self.folder)
    with self.assertRaisesRegex(
      ConfigError, r"text_field='body'.*\['ids', 'score', 'text'\]"
    ):
      self._tfds(text_field='body')

  @parameterized.parameters('dev', 'dev[:2]')
  def test_missing_split(self, name):
    _prepare(self.folder)
    with self.assertRaisesRegex(
      ConfigError, r"validation_split='dev.*\['test', 'train'\]"
    ):
      self._tfds(split='validation', validation_split=name)

  def test_split_that_cannot_be_parsed(self):
    _prepare(self.folder)
    with self.assertRaisesRegex(ConfigError, r"train_split='train\[x:\]'"):
      self._tfds(train_split='train[x:]')

  def test_dataset_that_is_not_prepared(self):
    with self.assertRaises(ConfigError) as caught:
      self._tfds()
    for part in (
      "dataset='small_texts'",
      'not prepared',
      self.folder,
      "file_format='array_record').download_and_prepare()",
    ):
      self.assertIn(part, str(caught.exception))

  def test_unknown_dataset(self):
    with self.assertRaisesRegex(
      ConfigError, f"dataset='no_such_texts'.*{self.folder}"
    ):
      self._tfds(dataset='no_such_texts')

  def test_damaged_dataset(self):
    _prepare(self.folder)
    folder = os.path.join(self.folder, 'small_texts', '1.2.0')
    (name,) = [n for n in os.listdir(folder) if '-train' in n]
    with open(os.path.join(folder, name), 'r+b') as file:
      file.seek(90)
      byte = file.read(1)[0]
      file.seek(90)
      file.write(bytes([byte ^ 1]))
    source = self._tfds()
    with self.assertRaisesRegex(
      cache.DamagedCacheError, "'small_texts': example [0-9] cannot be read"
    ):
      self._decode(source)

  def test_mocked_dataset(self):
    # lm1b's code is in the library; its mock gives str, not bytes.
    with tfds.testing.mock_data(num_examples=4):
      source = self._tfds(dataset='lm1b')
      self.assertLen(self._decode(source), 4)

  @parameterized.parameters(*synthetic.TASKS)
  def test_synthetic_documents_fill_a_row(self, task):
    fields = dict(kind='synthetic', task=task, num_documents=30)
    train = self._open('train', seq_len=200, **fields)
    validation = self._open('validation', seq_len=200, **fields)
    self.assertLen(train, 30)
    self.assertLen(validation, 16)
    self.assertLen(train[0].tokens, 201)
    texts = self._decode(train) + self._decode(validation)
    self.assertLen(set(texts), 46)
    other = self._open('train', seq_len=200, seed=1, **fields)
    self.assertEmpty(set(self._decode(other)) & set(texts))
    self.assertNotEqual(other.identity, train.identity)

  def test_synthetic_documents_fit_a_row_of_another_tokenizer(self):
    class PairTokenizer:
      """Every two bytes are one token."""

      bos_id, eos_id, pad_id, vocab_size = 65536, 65537, 65538, 65539
      identity = 'pairs'

      def encode(self, text):
        content = text.encode() + b' ' * (len(text) % 2)
        return np.frombuffer(content, np.uint16).astype(np.int32)

    self.tokenizer = PairTokenizer()
    source = self._open(kind='synthetic', task='copy', seq_len=500)
    self.assertBetween(len(source[0].tokens), 450, 501)

  def test_row_too_short_for_a_task(self):
    with self.assertRaisesRegex(ConfigError, "seq_len=40.*'mine'"):
      self._open(kind='synthetic', seq_len=40)

  def test_document_is_frozen(self):
    document = self._open(kind='synthetic')[0]
    with self.assertRaises(dataclasses.FrozenInstanceError):
      document.path = 'x'


if __name__ == '__main__':
  absltest.main()
