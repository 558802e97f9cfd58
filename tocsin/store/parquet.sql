-- :name write
-- In DuckDB. One thread and rows that come in order: the same rows make the same bytes.
copy (select * from read_csv('$FROM', auto_detect = false, header = false, delim = ',', quote = '"', escape = '"',
                             nullstr = '\N', allow_quoted_nulls = false, parallel = false, max_line_size = 33554432,
                             buffer_size = 33554432,
                             columns = $COLUMNS))
  to '$TO' (format parquet, compression zstd, row_group_size 61440, field_ids $NUMBERS)
