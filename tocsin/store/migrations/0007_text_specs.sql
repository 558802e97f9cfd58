-- A job's document is stored as the text it is answered with. Taken apart into jsonb it cost half of storing a job, to be
-- put together again whenever it was read. The planner wants the schedule alone.
alter table jobs alter column spec type text using spec::text;
alter table jobs add column schedule text;
update jobs set schedule = nullif((spec::json -> 'schedule')::text, 'null');
