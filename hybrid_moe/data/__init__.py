"""From documents to batches of packed rows.

corpus        a folder of text or code as a tensorflow-datasets dataset
source        documents as token ids, whatever they come from
token_store   the documents of a source, tokenised once
packing       documents into rows of a fixed length
records       rows in ArrayRecord files, each record with its checksum
mixture       which source gives which row of a stage
pipeline      batches whose whole state is one integer position
bigram        the baseline loss that a model has to beat
"""
