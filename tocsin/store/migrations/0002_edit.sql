-- Where `every` and `delay` count from, once an edit has changed them; null: from created_at.
alter table jobs add column anchored_at timestamptz;
