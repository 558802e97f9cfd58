-- pre: lanes that nobody goes through any more may go, and the names of functions and labels with them.
-- Since when every server is to ask before it sends somebody through it, which takes it back into use.
alter table lanes add column retired_at timestamptz;
-- Nearly always empty: every server looks into it.
create index lanes_retired on lanes (id) where retired_at is not null;
